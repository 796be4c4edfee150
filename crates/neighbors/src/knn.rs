//! The k nearest rows: a running list for each query, a bar that rises with it, and true distances of whatever could be
//! among the k, in f64.
//!
//! A matrix unit multiplies in one bf16 first: the error is large but bounded, and where rows are spread in many dimensions
//! few more than k are within it. Where they crowd, the same rows are packed again in two parts.

use crate::kmeans::below;
use crate::points::{Kept, checked_tolerance, frame_of, precision};
use crate::{Error, Metric, Options, Points};
use fulgurite_core::stop;
use fulgurite_cpu::pool;
use fulgurite_cpu::scan::{BLOCK, Digits, Fold, Frame, MAX_LANES, PackedKeys, Queries, Scanner, Scores};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Fewer keys than this are not shared among threads.
const SHARE: usize = 32 * BLOCK;
/// Rows shorter than this are multiplied in two parts at once: folding takes longer than products anyway.
const ROUGH_DIM: usize = 64;
/// A list with more candidates than this and a few for each neighbour is settled in f64, so that rows which are all alike do not
/// fill the memory.
const LONG: usize = 1024;

/// Rows found for queries: `k` for each, nearest first, lower rows first among equally near ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbors {
    /// Number of neighbours of each query.
    pub k: usize,
    /// Numbers of rows, `[queries, k]`.
    pub rows: Vec<u32>,
    /// Their distances, `[queries, k]`.
    pub distances: Vec<f32>,
}

impl Neighbors {
    /// The rows found for one query.
    pub fn of(&self, query: usize) -> &[u32] {
        &self.rows[query * self.k..(query + 1) * self.k]
    }

    /// The share of another answer's rows that are here too: 1 if all of them.
    pub fn recall(&self, truth: &Neighbors) -> f64 {
        let queries = self.rows.len() / self.k.max(1);
        let found = (0..queries).map(|q| truth.of(q).iter().filter(|row| self.of(q).contains(row)).count());
        found.sum::<usize>() as f64 / truth.rows.len().max(1) as f64
    }

    pub(crate) fn from(lists: Vec<Vec<(f64, u32)>>, k: usize, metric: Metric) -> Neighbors {
        let mut out = Neighbors { k, rows: Vec::with_capacity(lists.len() * k), distances: Vec::new() };
        for (far, row) in lists.into_iter().flatten() {
            out.rows.push(row);
            out.distances.push(if metric == Metric::Euclidean { far.sqrt() } else { far } as f32);
        }
        out
    }
}

/// Rows that can be searched.
///
/// ```
/// use fulgurite_neighbors::{Error, Metric, NeighborIndex, Options, Points};
/// let base = Points::new(&[0.0, 0.0, 3.0, 4.0, 6.0, 8.0], [3, 2])?;
/// let index = NeighborIndex::new(base, Metric::Euclidean, Options::default())?;
/// let found = index.search(Points::new(&[0.0, 0.0], [1, 2])?, 2)?;
/// assert_eq!((found.rows, found.distances), (vec![0, 1], vec![0.0, 5.0]));
/// assert_eq!(index.search_self(1)?.rows, [1, 0, 1]);
/// # Ok::<(), Error>(())
/// ```
pub struct NeighborIndex<'a> {
    base: Kept<'a>,
    options: Options,
    first: Packed,
    /// The same rows with more digits, once the first left too much to look at.
    more: OnceLock<Packed>,
}

/// Rows packed for a search.
struct Packed {
    search: Search,
    keys: PackedKeys,
}

impl std::fmt::Debug for NeighborIndex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("NeighborIndex");
        out.field("rows", &self.points().len()).field("metric", &self.first.search.metric).finish_non_exhaustive()
    }
}

/// Asks for the memory of a list of `k` neighbours for each query, while it is found and as it is returned.
pub(crate) fn ask_lists(queries: usize, k: usize) {
    const LIST: usize = 2 * size_of::<Mutex<Vec<(f64, u32)>>>();
    const NEIGHBOUR: usize = size_of::<(f64, u32)>() + size_of::<u32>() + size_of::<f32>();
    stop::ask("lists of neighbours", queries.saturating_mul(LIST.saturating_add(k.saturating_mul(NEIGHBOUR))));
}

/// The common part of all searches.
pub(crate) struct Search {
    pub scanner: Scanner,
    pub frame: Frame,
    pub metric: Metric,
    /// Whether candidates within the error of products are computed again in f64.
    pub exact: bool,
}

impl Search {
    pub fn new(base: Points<'_>, metric: Metric, options: &Options, (digits, exact): (Digits, bool)) -> Search {
        let scanner = Scanner::new(options, digits);
        Search { scanner, frame: frame_of(base, metric, scanner.threads()), metric, exact }
    }

    pub fn keys(&self, rows: &[f32], d: usize) -> PackedKeys {
        self.scanner.keys(rows, d, &self.frame, self.metric.worth())
    }

    /// Less is nearer; squared where euclidean.
    pub fn far(&self, a: &[f32], b: &[f32]) -> f64 {
        match self.metric {
            Metric::Euclidean => self.scanner.distance(a, b),
            Metric::Dot => -self.scanner.dot(a, b),
            Metric::Cosine => {
                let norms = self.scanner.dot(a, a).sqrt() * self.scanner.dot(b, b).sqrt();
                1.0 - self.scanner.dot(a, b) / norms.max(f64::MIN_POSITIVE)
            }
        }
    }

    /// The k nearest of the given keys for up to a group of queries, nearest first, and how many distances were computed for
    /// them. `row` gives the row of a key, and `skip` whether a query may not find it.
    pub fn nearest<'b>(
        &self,
        queries: &Queries<'_>,
        keys: &PackedKeys,
        range: Range<usize>,
        k: usize,
        row: &dyn Fn(u32) -> &'b [f32],
        skip: &dyn Fn(usize, u32) -> bool,
    ) -> (Vec<Vec<(f64, u32)>>, usize) {
        let (d, scanner) = (queries.d, &self.scanner);
        let margin = |norm: f32| match self.exact {
            true => scanner.margin(d, keys, 1.001 * f64::from(norm).sqrt()),
            false => 0.0,
        };
        let far = |query: usize, key: u32| self.far(queries.row(query), row(key));
        let mut fold = TopK {
            k,
            margin: &margin,
            skip,
            far: &far,
            margins: Vec::new(),
            bars: Vec::new(),
            lists: Vec::new(),
            found: Vec::new(),
            looked: 0,
        };
        scanner.walk(queries, keys, range.clone(), &mut fold);
        let mut out = Vec::with_capacity(fold.lists.len());
        let mut looked = fold.looked;
        for (i, list) in fold.lists.iter_mut().enumerate() {
            shrink(list, k, fold.margins[i]);
            looked += list.len();
            let mut exact: Vec<(f64, u32)> = list.iter().map(|&(_, key)| (far(i, key), key)).collect();
            if exact.len() < k {
                // Scores that are no numbers, or fewer keys: look at every one.
                let every = (range.start as u32..range.end as u32).filter(|&key| !skip(i, key));
                exact = every.map(|key| (far(i, key), key)).collect();
            }
            exact.sort_unstable_by(nearer);
            exact.truncate(k);
            out.push(exact);
        }
        (out, looked)
    }
}

/// The order of answers: by distance, then by row.
pub(crate) fn nearer(a: &(f64, u32), b: &(f64, u32)) -> std::cmp::Ordering {
    a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
}

struct TopK<'a> {
    k: usize,
    margin: &'a dyn Fn(f32) -> f64,
    skip: &'a dyn Fn(usize, u32) -> bool,
    far: &'a dyn Fn(usize, u32) -> f64,
    margins: Vec<f64>,
    /// The worth that a key needs to be among the k, less twice the error.
    bars: Vec<f32>,
    lists: Vec<Vec<(f32, u32)>>,
    found: Vec<(u32, u32, f32)>,
    /// Distances computed.
    looked: usize,
}

impl TopK<'_> {
    /// Keeps the k exactly nearest keys of a list: each dropped key has k nearer ones.
    fn settle(&mut self, query: usize) {
        let list = &mut self.lists[query];
        self.looked += list.len();
        let mut exact: Vec<((f64, u32), f32)> =
            list.iter().map(|&(value, key)| (((self.far)(query, key), key), value)).collect();
        exact.select_nth_unstable_by(self.k - 1, |a, b| nearer(&a.0, &b.0));
        list.clear();
        list.extend(exact[..self.k].iter().map(|&((_, key), value)| (value, key)));
    }
}

impl Fold for TopK<'_> {
    fn begin(&mut self, norms: &[f32]) {
        self.margins = norms.iter().map(|&norm| (self.margin)(norm)).collect();
        self.bars = vec![f32::NEG_INFINITY; norms.len()];
        self.bars.resize(norms.len().next_multiple_of(MAX_LANES), f32::INFINITY);
        self.lists = vec![Vec::new(); norms.len()];
    }

    fn tile(&mut self, scores: &Scores<'_>) {
        let mut found = std::mem::take(&mut self.found);
        found.clear();
        scores.above(&self.bars, &mut found);
        let full = 2 * self.k + 16;
        for &(lane, key, value) in &found {
            let (query, key) = (scores.lanes.0 + lane as usize, scores.first_key as u32 + key);
            // The bar may have risen since.
            if value < self.bars[query] || (self.skip)(query, key) {
                continue;
            }
            let list = &mut self.lists[query];
            list.push((value, key));
            if list.len() >= full && list.len().is_multiple_of(full / 2) {
                self.bars[query] = shrink(list, self.k, self.margins[query]);
                if list.len() > LONG + 4 * full {
                    self.settle(query);
                }
            }
        }
        self.found = found;
    }
}

/// Drops keys that cannot be among the k any more; returns the new bar.
fn shrink(list: &mut Vec<(f32, u32)>, k: usize, margin: f64) -> f32 {
    if list.len() < k || k == 0 {
        return f32::NEG_INFINITY;
    }
    let (_, kth, _) = list.select_nth_unstable_by(k - 1, |a, b| b.0.total_cmp(&a.0));
    let bar = below(f64::from(kth.0) - 2.0 * margin);
    if bar.is_nan() {
        return f32::NEG_INFINITY;
    }
    list.retain(|x| x.0 >= bar);
    bar
}

impl<'a> NeighborIndex<'a> {
    /// An index over rows, which are packed once: as much memory as they take, or half of it where a matrix unit is tried with
    /// one bf16 first.
    pub fn new(base: Points<'a>, metric: Metric, options: Options) -> Result<NeighborIndex<'a>, Error> {
        NeighborIndex::with_tolerance(base, metric, options, None)
    }

    /// As [`new`](Self::new), allowing errors of a score relative to the norms of query and row (about the rows' mean). From 2^-6
    /// on, a matrix unit multiplies in one bf16, from 2^-12 on in two, and nothing within their error is looked at again: a
    /// row that was missed is worth at most twice the error more than one that was found. Distances that are
    /// returned are true. `None` is exact.
    pub fn with_tolerance(
        base: Points<'a>,
        metric: Metric,
        options: Options,
        score_tolerance: Option<f64>,
    ) -> Result<NeighborIndex<'a>, Error> {
        checked_tolerance(score_tolerance)?;
        let precision = match precision(score_tolerance) {
            (Digits::Sixteen, true) if base.dim() >= ROUGH_DIM => (Digits::Eight, true),
            other => other,
        };
        NeighborIndex::packed(base, metric, options, precision)
    }

    pub(crate) fn packed(
        base: Points<'a>,
        metric: Metric,
        options: Options,
        precision: (Digits, bool),
    ) -> Result<NeighborIndex<'a>, Error> {
        let base = base.with_angles("points", metric)?;
        let pack = || {
            let search = Search::new(base, metric, &options, precision);
            let keys = search.keys(base.data(), base.dim());
            Packed { search, keys }
        };
        let first = stop::catch_memory(pack)?;
        Ok(NeighborIndex { base: Kept::borrowed(base), options, first, more: OnceLock::new() })
    }

    /// The same with a copy of the rows, to be kept for as long as one likes.
    pub fn into_owned(self) -> Result<NeighborIndex<'static>, Error> {
        let NeighborIndex { base, options, first, more } = self;
        Ok(NeighborIndex { base: base.into_owned()?, options, first, more })
    }

    /// The rows.
    pub fn points(&self) -> Points<'_> {
        self.base.points()
    }

    pub(crate) fn scanner(&self) -> &Scanner {
        &self.first.search.scanner
    }

    /// The k nearest rows of each query.
    pub fn search(&self, queries: Points<'_>, k: usize) -> Result<Neighbors, Error> {
        let metric = self.first.search.metric;
        let queries = queries.of_dim("queries", self.points().dim())?.with_angles("queries", metric)?;
        self.check(k, self.points().len())?;
        let found = || Neighbors::from(self.lists(queries, k, &|_, _| false), k, metric);
        Ok(stop::catch_memory(found)?)
    }

    /// The k nearest other rows of each row.
    pub fn search_self(&self, k: usize) -> Result<Neighbors, Error> {
        self.check(k, self.points().len() - 1)?;
        let own = |query: usize, key: u32| query == key as usize;
        let found = || Neighbors::from(self.lists(self.points(), k, &own), k, self.first.search.metric);
        Ok(stop::catch_memory(found)?)
    }

    fn check(&self, k: usize, most: usize) -> Result<(), Error> {
        if k == 0 || k > most {
            let hint = if k == 0 { "at least one" } else { "there are not more rows to find" };
            return Err(Error::Count { arg: "k", got: k, low: 1, high: most, hint });
        }
        Ok(())
    }

    /// Lists for queries, nearest first; `skip` is asked with the numbers of query and row.
    pub(crate) fn lists(
        &self,
        queries: Points<'_>,
        k: usize,
        skip: &(dyn Fn(usize, u32) -> bool + Sync),
    ) -> Vec<Vec<(f64, u32)>> {
        ask_lists(queries.len(), k);
        let (base, threads, group) = (self.points(), self.scanner().threads(), self.scanner().group());
        let (n, groups) = (base.len(), queries.len().div_ceil(group));
        // Few queries: threads take parts of the keys. What is found does not depend on the cuts.
        let shares = if groups >= 2 * threads { 1 } else { (2 * threads).div_ceil(groups) };
        let share = n.div_ceil(shares).max(SHARE).next_multiple_of(BLOCK);
        let shares = n.div_ceil(share);
        let mut lists: Vec<Mutex<Vec<(f64, u32)>>> = Vec::new();
        lists.resize_with(queries.len(), Mutex::default);
        // Distances computed for each list.
        let run = |packed: &Packed, items: Range<usize>| {
            let (looked, asked) = (AtomicUsize::new(0), AtomicUsize::new(0));
            pool::run(threads, items.len(), &|item| {
                let item = items.start + item;
                let (first, part) = (item / shares * group, item % shares);
                let range = (first, group.min(queries.len() - first));
                let (d, frame) = (queries.dim(), &packed.search.frame);
                let asks = Queries { rows: queries.data(), d, range, list: None, frame };
                let keys = part * share..((part + 1) * share).min(n);
                let row = |key: u32| base.row(key as usize);
                let skip_here = |i: usize, key: u32| skip(first + i, key);
                let (found, count) = packed.search.nearest(&asks, &packed.keys, keys, k, &row, &skip_here);
                looked.fetch_add(count, Ordering::Relaxed);
                asked.fetch_add(found.len(), Ordering::Relaxed);
                for (i, found) in found.into_iter().enumerate() {
                    lists[first + i].lock().unwrap_or_else(|e| e.into_inner()).extend(found);
                }
            });
            looked.into_inner() / asked.into_inner().max(1)
        };
        let (items, mut done) = (groups * shares, 0);
        if self.first.search.exact && self.scanner().keeps_eight() && self.more.get().is_none() {
            // A look at the first groups tells how many are within the error. The answer is the same either way.
            done = items.min(threads);
            if run(&self.first, 0..done) > 8 * k + 64 {
                self.more.get_or_init(|| self.with_more());
            }
        }
        run(self.more.get().unwrap_or(&self.first), done..items);
        lists
            .into_iter()
            .map(|list| {
                let mut list = list.into_inner().unwrap_or_else(|e| e.into_inner());
                if shares > 1 {
                    list.sort_unstable_by(nearer);
                    list.truncate(k);
                }
                list
            })
            .collect()
    }

    fn with_more(&self) -> Packed {
        let (base, first) = (self.points(), &self.first.search);
        let scanner = Scanner::new(&self.options, Digits::Sixteen);
        let search = Search { scanner, frame: first.frame.clone(), metric: first.metric, exact: first.exact };
        let keys = search.keys(base.data(), base.dim());
        Packed { search, keys }
    }

    /// Calls `take` with every pair of a query (by its row number, from `queries` on) and a row that are at most `radius`
    /// apart, euclidean; each query's rows ascend.
    pub(crate) fn within(&self, queries: Range<usize>, radius: f64, take: &mut dyn FnMut(usize, u32)) {
        let Packed { search, keys } = &self.first;
        let (base, scanner, d) = (self.points(), &search.scanner, self.points().dim());
        let scale = f64::from(search.frame.scale);
        let limit = radius * radius;
        let margin = |norm: f32| scanner.margin(d, keys, 1.001 * f64::from(norm).sqrt());
        let mut fold = Within {
            base,
            search,
            first: queries.start,
            limit,
            half: 0.5 * limit * scale * scale,
            scale: scale * scale,
            margin: &margin,
            lanes: Vec::new(),
            bars: Vec::new(),
            found: Vec::new(),
            take,
        };
        let range = (queries.start, queries.len());
        let asks = Queries { rows: base.data(), d, range, list: None, frame: &search.frame };
        scanner.walk(&asks, keys, 0..keys.len(), &mut fold);
    }
}

/// Every pair within a radius.
struct Within<'a> {
    base: Points<'a>,
    search: &'a Search,
    first: usize,
    /// The radius squared, as data and half of it in the frame.
    limit: f64,
    half: f64,
    scale: f64,
    margin: &'a dyn Fn(f32) -> f64,
    /// Half the squared norm, and the error, of each lane.
    lanes: Vec<(f64, f64)>,
    bars: Vec<f32>,
    found: Vec<(u32, u32, f32)>,
    take: &'a mut dyn FnMut(usize, u32),
}

impl Fold for Within<'_> {
    fn begin(&mut self, norms: &[f32]) {
        // The worth of a key at the radius: half the norm less half the squared distance.
        self.lanes = norms.iter().map(|&norm| (0.5 * f64::from(norm), (self.margin)(norm) * 1.01)).collect();
        self.bars = self.lanes.iter().map(|&(half, margin)| below(half - self.half - 2.0 * margin)).collect();
        self.bars.iter_mut().filter(|bar| bar.is_nan()).for_each(|bar| *bar = f32::NEG_INFINITY);
        self.bars.resize(norms.len().next_multiple_of(MAX_LANES), f32::INFINITY);
    }

    fn tile(&mut self, scores: &Scores<'_>) {
        self.found.clear();
        scores.above(&self.bars, &mut self.found);
        for &(lane, key, value) in &self.found {
            let query = scores.lanes.0 + lane as usize;
            let (half, margin) = self.lanes[query];
            let (row, key) = (self.first + query, scores.first_key as u32 + key);
            let sure = f64::from(value) > half - self.half + 2.0 * margin && self.scale > 0.0;
            if sure || self.search.far(self.base.row(row), self.base.row(key as usize)) <= self.limit {
                (self.take)(row, key);
            }
        }
    }
}

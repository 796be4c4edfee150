//! The k nearest rows: a running list for each query, a bar that rises with it, and true distances of whatever could be
//! among the k, in f64.

use crate::kmeans::below;
use crate::points::frame_of;
use crate::{Error, Metric, Options, Points};
use fulgurite_cpu::pool;
use fulgurite_cpu::scan::{BLOCK, Digits, Fold, Frame, Keys, MAX_LANES, Queries, Scanner, Scores};
use std::ops::Range;
use std::sync::Mutex;

/// Fewer keys than this are not shared among threads.
const SHARE: usize = 32 * BLOCK;

/// Rows found for queries: `k` for each, nearest first, lower rows first among equally near ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbors {
    /// How many for each query.
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
    base: Points<'a>,
    pub(crate) search: Search,
    keys: Keys,
}

impl std::fmt::Debug for NeighborIndex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("NeighborIndex");
        out.field("rows", &self.base.len()).field("metric", &self.search.metric).finish_non_exhaustive()
    }
}

/// What searches have in common.
pub(crate) struct Search {
    pub scanner: Scanner,
    pub frame: Frame,
    pub metric: Metric,
}

impl Search {
    pub fn new(base: Points<'_>, metric: Metric, options: &Options) -> Search {
        let scanner = Scanner::new(options, Digits::Sixteen);
        Search { scanner, frame: frame_of(base, metric, scanner.threads()), metric }
    }

    pub fn keys(&self, rows: &[f32], d: usize) -> Keys {
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

    /// The k nearest of the given keys for up to a group of queries, exactly, nearest first. `row` gives the row of a key, and
    /// `skip` whether a query may not find it.
    pub fn nearest<'b>(
        &self,
        queries: &Queries<'_>,
        keys: &Keys,
        range: Range<usize>,
        k: usize,
        row: &dyn Fn(u32) -> &'b [f32],
        skip: &dyn Fn(usize, u32) -> bool,
    ) -> Vec<Vec<(f64, u32)>> {
        let (d, scanner) = (queries.d, &self.scanner);
        let margin = |norm: f32| scanner.margin(d, keys, 1.001 * f64::from(norm).sqrt());
        let mut fold = TopK {
            k,
            margin: &margin,
            skip,
            margins: Vec::new(),
            bars: Vec::new(),
            lists: Vec::new(),
            found: Vec::new(),
        };
        scanner.walk(queries, keys, range.clone(), &mut fold);
        let mut out = Vec::with_capacity(fold.lists.len());
        for (i, list) in fold.lists.iter_mut().enumerate() {
            shrink(list, k, fold.margins[i]);
            let x = queries.row(i);
            let mut exact: Vec<(f64, u32)> = list.iter().map(|&(_, key)| (self.far(x, row(key)), key)).collect();
            if exact.len() < k {
                // Scores that are no numbers, or fewer keys: look at every one.
                let every = (range.start as u32..range.end as u32).filter(|&key| !skip(i, key));
                exact = every.map(|key| (self.far(x, row(key)), key)).collect();
            }
            exact.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            exact.truncate(k);
            out.push(exact);
        }
        out
    }
}

struct TopK<'a> {
    k: usize,
    margin: &'a dyn Fn(f32) -> f64,
    skip: &'a dyn Fn(usize, u32) -> bool,
    margins: Vec<f64>,
    /// What a key must be worth to be among the k, less twice the error.
    bars: Vec<f32>,
    lists: Vec<Vec<(f32, u32)>>,
    found: Vec<(u32, u32, f32)>,
}

impl Fold for TopK<'_> {
    fn begin(&mut self, norms: &[f32]) {
        self.margins = norms.iter().map(|&norm| (self.margin)(norm)).collect();
        self.bars = vec![f32::NEG_INFINITY; norms.len()];
        self.bars.resize(norms.len().next_multiple_of(MAX_LANES), f32::INFINITY);
        self.lists = vec![Vec::new(); norms.len()];
    }

    fn tile(&mut self, scores: &Scores<'_>) {
        self.found.clear();
        scores.above(&self.bars, &mut self.found);
        let full = 2 * self.k + 16;
        for &(lane, key, value) in &self.found {
            let (query, key) = (scores.lanes.0 + lane as usize, scores.first_key as u32 + key);
            // The bar may have risen since.
            if value < self.bars[query] || (self.skip)(query, key) {
                continue;
            }
            let list = &mut self.lists[query];
            list.push((value, key));
            if list.len() >= full && list.len().is_multiple_of(full / 2) {
                self.bars[query] = shrink(list, self.k, self.margins[query]);
            }
        }
    }
}

/// Drops what cannot be among the k any more; returns the new bar.
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
    /// An index over rows, which are packed once: as much memory as they take.
    pub fn new(base: Points<'a>, metric: Metric, options: Options) -> Result<NeighborIndex<'a>, Error> {
        let base = base.with_angles("points", metric)?;
        let search = Search::new(base, metric, &options);
        let keys = search.keys(base.data(), base.dim());
        Ok(NeighborIndex { base, search, keys })
    }

    /// The rows.
    pub fn points(&self) -> Points<'a> {
        self.base
    }

    /// The k nearest rows of each query.
    pub fn search(&self, queries: Points<'_>, k: usize) -> Result<Neighbors, Error> {
        let queries = queries.of_dim("queries", self.base.dim())?.with_angles("queries", self.search.metric)?;
        self.check(k, self.base.len())?;
        Ok(Neighbors::from(self.lists(queries, k, &|_, _| false), k, self.search.metric))
    }

    /// The k nearest other rows of each row.
    pub fn search_self(&self, k: usize) -> Result<Neighbors, Error> {
        self.check(k, self.base.len() - 1)?;
        let own = |query: usize, key: u32| query == key as usize;
        Ok(Neighbors::from(self.lists(self.base, k, &own), k, self.search.metric))
    }

    fn check(&self, k: usize, most: usize) -> Result<(), Error> {
        if k == 0 || k > most {
            let hint = if k == 0 { "at least one" } else { "there are not more rows to find" };
            return Err(Error::Count { arg: "k", got: k, low: 1, high: most, hint });
        }
        Ok(())
    }

    /// Exact lists; `skip` is asked with the numbers of query and row.
    pub(crate) fn lists(
        &self,
        queries: Points<'_>,
        k: usize,
        skip: &(dyn Fn(usize, u32) -> bool + Sync),
    ) -> Vec<Vec<(f64, u32)>> {
        let (scanner, n) = (&self.search.scanner, self.base.len());
        let group = scanner.group();
        let groups = queries.len().div_ceil(group);
        // Few queries: threads take parts of the keys. What is found is exact, so the cuts do not show.
        let shares = if groups >= 2 * scanner.threads() { 1 } else { (2 * scanner.threads()).div_ceil(groups) };
        let share = n.div_ceil(shares).max(SHARE).next_multiple_of(BLOCK);
        let shares = n.div_ceil(share);
        let mut lists: Vec<Mutex<Vec<(f64, u32)>>> = Vec::new();
        lists.resize_with(queries.len(), Mutex::default);
        pool::run(scanner.threads(), groups * shares, &|item| {
            let (first, part) = (item / shares * group, item % shares);
            let count = group.min(queries.len() - first);
            let asks = Queries {
                rows: queries.data(),
                d: queries.dim(),
                range: (first, count),
                list: None,
                frame: &self.search.frame,
            };
            let range = part * share..((part + 1) * share).min(n);
            let skip_here = |i: usize, key: u32| skip(first + i, key);
            let found =
                self.search.nearest(&asks, &self.keys, range, k, &|key| self.base.row(key as usize), &skip_here);
            for (i, found) in found.into_iter().enumerate() {
                lists[first + i].lock().unwrap_or_else(|e| e.into_inner()).extend(found);
            }
        });
        lists
            .into_iter()
            .map(|list| {
                let mut list = list.into_inner().unwrap_or_else(|e| e.into_inner());
                if shares > 1 {
                    list.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
                    list.truncate(k);
                }
                list
            })
            .collect()
    }

    /// Calls `take` with every pair of a query (by its row number, from `queries` on) and a row that are at most `radius`
    /// apart, euclidean; each query's rows ascend.
    pub(crate) fn within(&self, queries: Range<usize>, radius: f64, take: &mut dyn FnMut(usize, u32)) {
        let (scanner, d) = (&self.search.scanner, self.base.dim());
        let scale = f64::from(self.search.frame.scale);
        let limit = radius * radius;
        let margin = |norm: f32| scanner.margin(d, &self.keys, 1.001 * f64::from(norm).sqrt());
        let mut fold = Within {
            base: self.base,
            search: &self.search,
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
        let asks = Queries { rows: self.base.data(), d, range, list: None, frame: &self.search.frame };
        scanner.walk(&asks, &self.keys, 0..self.keys.len(), &mut fold);
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
        // What a key at the radius is worth: half the norm less half the squared distance.
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

//! k-means over rows that do not fit in memory, and by mini-batches.

use super::assign::Assign;
use super::update::{CHUNK, Update, unit};
use super::{Init, KMeans, KMeansModel, Progress, init, unlabelled};
use crate::points::{Moments, all_finite};
use crate::{Error, Metric, Points, RowSource};
use fulgurite_core::random::Rng;
use fulgurite_core::stop;
use std::sync::mpsc;

/// A message between two threads: rows, and the number of the first.
type Filled = Result<(usize, Vec<f32>), Error>;

/// Elements read at a time: a part of the second-level cache.
const PIECE: usize = 1 << 16;

impl KMeans<'_> {
    /// Clusters rows that are read in parts, of which no more than `memory_bytes` are held at a time (at least two parts
    /// of 32,768 rows); labels and centroids come on top. Every step reads all rows once; the
    /// result is that of [`fit`](KMeans::fit), bit for bit, from the same first centroids. k-means++ looks at
    /// a sample of the rows where not all may be held.
    pub fn fit_rows(
        &self,
        source: &dyn RowSource,
        memory_bytes: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<KMeansModel, Error> {
        let rows = self.room(source, memory_bytes)?;
        stop::catch_memory(|| self.fitted_rows(source, rows, progress))?
    }

    fn fitted_rows(
        &self,
        source: &dyn RowSource,
        rows: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<KMeansModel, Error> {
        let [n, d] = source.shape();
        self.ask_parts([n, d], rows);
        let scanner = self.scanner();
        let mut moments = Moments::new(d);
        Parts::new(source, rows).each(|first, points| {
            points.with_angles("points", self.metric).map_err(|e| moved_by(e, first))?;
            moments.add(points, scanner.threads());
            Ok(())
        })?;
        let frame = moments.frame(self.metric);
        let stop = self.stop(&moments);
        let mut centroids = self.first_of(source, 2 * rows)?;
        let assign = Assign::new(scanner, &frame, self.metric, self.exact());
        let (mut labels, mut parts) = (unlabelled(n), Parts::new(source, rows));
        let (mut steps, mut settled, mut moved) = (0, false, 0.0);
        while steps < self.max_steps && !settled {
            let keys = assign.keys(&centroids, d);
            let (mut update, mut changed) = (Update::new(self.clusters, d), 0);
            parts.each(|first, points| {
                let own = &mut labels[first..first + points.len()];
                changed += assign.labels(points, &keys, &centroids, own);
                update.add(&scanner, points, own);
                progress(Progress { step: steps, rows: first + points.len(), of: n, moved });
                Ok(())
            })?;
            moved = update.finish(&mut centroids, self.metric);
            steps += 1;
            settled = moved * moved <= stop || changed == 0;
        }
        let (keys, mut inertia) = (assign.keys(&centroids, d), 0.0);
        parts.each(|first, points| {
            let own = &mut labels[first..first + points.len()];
            assign.labels(points, &keys, &centroids, own);
            assign.inertia_parts(points, &centroids, own, &mut inertia);
            progress(Progress { step: steps, rows: first + points.len(), of: n, moved });
            Ok(())
        })?;
        Ok(KMeansModel { centroids, labels, inertia, steps, d, made: self.made(frame) })
    }

    /// Clusters by mini-batches: each step draws `batch` different rows, assigns them, and moves each centroid to the mean of
    /// all rows that it was given so far. At the end every row gets its label. Not exact, and fast where
    /// rows are many.
    pub fn fit_batches(
        &self,
        source: &dyn RowSource,
        batch: usize,
        memory_bytes: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<KMeansModel, Error> {
        let n = source.shape()[0];
        let rows = self.room(source, memory_bytes)?;
        if batch == 0 || batch > n {
            return Err(Error::Count { arg: "batch", got: batch, low: 1, high: n, hint: "rows drawn for each step" });
        }
        stop::catch_memory(|| self.fitted_batches(source, [rows, batch], progress))?
    }

    fn fitted_batches(
        &self,
        source: &dyn RowSource,
        [rows, batch]: [usize; 2],
        progress: &mut dyn FnMut(Progress),
    ) -> Result<KMeansModel, Error> {
        let [n, d] = source.shape();
        self.ask_parts([n, d], rows);
        let mut parts = Parts::new(source, rows);
        let scanner = self.scanner();
        let mut moments = Moments::new(d);
        let mut centroids = self.first_of(source, 2 * rows)?;
        let mut seen = vec![0u64; self.clusters];
        let mut rng = Rng::new(self.seed ^ 0x6261_7463_6865_7321);
        let (mut buffer, mut labels) = (stop::zeros::<f32>("a batch", batch * d), unlabelled(batch));
        let (mut steps, mut moved) = (0, f64::INFINITY);
        while steps < self.max_steps {
            read_list(source, &drawn(n, batch, rng.bits()), &mut buffer)?;
            let points = Points::new(&buffer, [batch, d])?.with_angles("points", self.metric)?;
            moments.add(points, scanner.threads());
            let frame = moments.frame(self.metric);
            let assign = Assign::new(scanner, &frame, self.metric, self.exact());
            assign.labels(points, &assign.keys(&centroids, d), &centroids, &mut labels);
            moved = follow(&mut centroids, &mut seen, points, &labels, self.metric);
            steps += 1;
            progress(Progress { step: steps, rows: batch, of: n, moved });
            if moved * moved <= self.stop(&moments) {
                break;
            }
        }
        source.unchanged()?;
        let frame = {
            let mut all = Moments::new(d);
            parts.each(|first, points| {
                points.with_angles("points", self.metric).map_err(|e| moved_by(e, first))?;
                all.add(points, scanner.threads());
                Ok(())
            })?;
            all.frame(self.metric)
        };
        let assign = Assign::new(scanner, &frame, self.metric, self.exact());
        let (keys, mut inertia, mut labels) = (assign.keys(&centroids, d), 0.0, unlabelled(n));
        parts.each(|first, points| {
            let own = &mut labels[first..first + points.len()];
            assign.labels(points, &keys, &centroids, own);
            assign.inertia_parts(points, &centroids, own, &mut inertia);
            progress(Progress { step: steps, rows: first + points.len(), of: n, moved });
            Ok(())
        })?;
        Ok(KMeansModel { centroids, labels, inertia, steps, d, made: self.made(frame) })
    }

    /// Asks for the memory of two parts, besides that of the fit.
    fn ask_parts(&self, [n, d]: [usize; 2], rows: usize) {
        self.ask(n, d);
        stop::ask("two parts of the rows", rows.min(n).saturating_mul(2 * d * size_of::<f32>()));
    }

    /// Rows of a part, of which two are held.
    fn room(&self, source: &dyn RowSource, memory_bytes: usize) -> Result<usize, Error> {
        let [n, d] = source.shape();
        if n == 0 || d == 0 {
            return Err(Error::Empty { arg: "points", rows: n, columns: d, hint: "give it rows with elements" });
        }
        if n >= 1 << 31 {
            return Err(Error::TooMany { arg: "points", got: n });
        }
        self.check(n, d)?;
        let least = 2 * CHUNK.min(n) * d * 4;
        if memory_bytes < least {
            let hint = "two parts of 32,768 rows have to fit";
            return Err(Error::Count { arg: "memory_bytes", got: memory_bytes, low: least, high: usize::MAX, hint });
        }
        Ok((memory_bytes / (8 * d) / CHUNK * CHUNK).max(CHUNK))
    }

    fn first_of(&self, source: &dyn RowSource, room: usize) -> Result<Vec<f32>, Error> {
        let [n, d] = source.shape();
        let read = |list: &[usize]| {
            let mut rows: Vec<f32> = stop::zeros("rows for the first centroids", list.len() * d);
            read_list(source, list, &mut rows).map(|()| rows)
        };
        match self.init {
            Init::Given(centroids) => {
                let mut centroids = centroids.data().to_vec();
                if self.metric == Metric::Cosine {
                    centroids.chunks_exact_mut(d).for_each(unit);
                }
                Ok(centroids)
            }
            Init::Random => {
                let mut rows = read(&init::distinct(n, self.clusters, self.seed))?;
                Points::new(&rows, [self.clusters, d])?;
                if self.metric == Metric::Cosine {
                    rows.chunks_exact_mut(d).for_each(unit);
                }
                Ok(rows)
            }
            Init::PlusPlus => {
                let rows = read(&drawn(n, room.clamp(self.clusters, n), self.seed))?;
                let points = Points::new(&rows, [rows.len() / d, d])?;
                let scanner = self.scanner();
                let frame = crate::points::frame_of(points, self.metric, scanner.threads());
                Ok(self.first(points, &scanner, &frame))
            }
        }
    }
}

/// `count` different row numbers, ascending.
fn drawn(n: usize, count: usize, seed: u64) -> Vec<usize> {
    if count == n {
        return (0..n).collect();
    }
    let mut rows = init::distinct(n, count, seed);
    rows.sort_unstable();
    rows
}

fn read_list(source: &dyn RowSource, list: &[usize], out: &mut [f32]) -> Result<(), Error> {
    let d = source.shape()[1];
    list.iter().zip(out.chunks_exact_mut(d)).try_for_each(|(&row, out)| source.read(row, out))
}

/// Rows read in parts, one while another is worked on. The memory of both is kept from one pass to the next.
struct Parts<'a> {
    source: &'a dyn RowSource,
    rows: usize,
    spare: Vec<Vec<f32>>,
}

impl<'a> Parts<'a> {
    fn new(source: &'a dyn RowSource, rows: usize) -> Parts<'a> {
        Parts { source, rows, spare: vec![Vec::new(), Vec::new()] }
    }

    /// Calls `work` with every part in order.
    fn each(&mut self, mut work: impl FnMut(usize, Points<'_>) -> Result<(), Error>) -> Result<(), Error> {
        let (source, rows, [n, d]) = (self.source, self.rows, self.source.shape());
        let (filled_in, filled) = mpsc::sync_channel::<Filled>(0);
        let (spare_in, spare) = mpsc::channel::<Vec<f32>>();
        self.spare.drain(..).for_each(|buffer| _ = spare_in.send(buffer));
        // The closure owns its ends of the channels: if it returns early, the reader's calls fail, and the reader ends.
        std::thread::scope(move |scope| {
            let reader = scope.spawn(move || {
                for first in (0..n).step_by(rows) {
                    let Ok(mut buffer) = spare.recv() else { break };
                    buffer.resize(rows.min(n - first) * d, 0.0);
                    let read = fill(source, first, &mut buffer).map(|()| (first, buffer));
                    let failed = read.is_err();
                    if filled_in.send(read).is_err() || failed {
                        break;
                    }
                }
                spare
            });
            while let Ok(part) = filled.recv() {
                let (first, buffer) = part?;
                work(first, Points::proven(&buffer, [buffer.len() / d, d]))?;
                let _ = spare_in.send(buffer);
            }
            if let Ok(spare) = reader.join() {
                self.spare.extend(spare.try_iter());
            }
            source.unchanged()
        })
    }
}

/// Reads rows and proves them finite, a piece at a time while it is in the cache.
fn fill(source: &dyn RowSource, first: usize, out: &mut [f32]) -> Result<(), Error> {
    let d = source.shape()[1];
    let rows = (PIECE / d).max(1);
    for (i, piece) in out.chunks_mut(rows * d).enumerate() {
        let first = first + i * rows;
        source.read(first, piece)?;
        if !all_finite(piece) {
            Points::new(piece, [piece.len() / d, d]).map_err(|e| moved_by(e, first))?;
        }
    }
    Ok(())
}

/// A message about a row of a part, told about the row of the whole.
fn moved_by(error: Error, first: usize) -> Error {
    match error {
        Error::NotFinite { arg, row, column, value } => Error::NotFinite { arg, row: row + first, column, value },
        Error::NoAngle { arg, row } => Error::NoAngle { arg, row: row + first },
        other => other,
    }
}

/// Moves each centroid to the mean of the rows it was ever given. Returns how far they moved.
fn follow(centroids: &mut [f32], seen: &mut [u64], points: Points<'_>, labels: &[u32], metric: Metric) -> f64 {
    let d = points.dim();
    let mut sums = vec![0.0f64; centroids.len()];
    let mut counts = vec![0u64; seen.len()];
    for (i, &label) in labels.iter().enumerate() {
        let own = &mut sums[label as usize * d..(label as usize + 1) * d];
        own.iter_mut().zip(points.row(i)).for_each(|(sum, &x)| *sum += f64::from(x));
        counts[label as usize] += 1;
    }
    let mut moved = 0.0;
    for (c, centroid) in centroids.chunks_exact_mut(d).enumerate().filter(|(c, _)| counts[*c] > 0) {
        seen[c] += counts[c];
        let (before, rate) = (centroid.to_vec(), 1.0 / seen[c] as f64);
        for (x, sum) in centroid.iter_mut().zip(&sums[c * d..]) {
            let old = f64::from(*x);
            *x = (old + (sum - counts[c] as f64 * old) * rate) as f32;
        }
        if metric == Metric::Cosine {
            unit(centroid);
        }
        moved += before.iter().zip(&*centroid).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>();
    }
    moved.sqrt()
}

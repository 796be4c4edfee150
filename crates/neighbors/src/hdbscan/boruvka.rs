//! A minimum spanning tree of mutual reachability by Boruvka's rounds.
//!
//! The facts about a point stay true: its nearest point outside its component is the same until the two are joined,
//! and its next one is never nearer. So a round looks again only at points whose neighbour was joined and which could still
//! be the one through which their component grows.

use super::TreeEdge;
use crate::points::frame_of;
use crate::union::Union;
use crate::{Metric, Options, Points};
use fulgurite_cpu::pool;
use fulgurite_cpu::scan::{Best, Digits, Fold, Frame, MAX_LANES, Others, PackedKeys, Queries, Scanner, Scores, Worth};
use std::sync::Mutex;

/// The nearest point outside, as far as is known.
#[derive(Debug, Clone, Copy)]
struct Known {
    weight: f64,
    other: u32,
    /// No point outside is nearer than this.
    least: f64,
}

struct Walk<'a> {
    points: Points<'a>,
    cores: &'a [f64],
    scanner: Scanner,
    frame: Frame,
    keys: PackedKeys,
    /// Half the squared core distance in the frame.
    caps: Vec<f32>,
}

/// The tree, shortest edge first. `lists` are each point's nearest others, with squared distances.
pub(super) fn tree(points: Points<'_>, cores: &[f64], lists: &[Vec<(f64, u32)>], options: &Options) -> Vec<TreeEdge> {
    let n = points.len();
    let scanner = Scanner::new(options, Digits::All);
    let frame = frame_of(points, Metric::Euclidean, scanner.threads());
    let keys = scanner.keys(points.data(), points.dim(), &frame, Worth::Near);
    let scale = f64::from(frame.scale);
    let caps = cores.iter().map(|core| (0.5 * (core * scale).powi(2)) as f32).collect();
    let walk = Walk { points, cores, scanner, frame, keys, caps };

    let mut known: Vec<Known> = (0..n).map(|i| walk.first_known(i, &lists[i])).collect();
    let mut sets = Union::new(n);
    let mut edges: Vec<TreeEdge> = Vec::with_capacity(n - 1);
    while edges.len() < n - 1 {
        let roots: Vec<u32> = (0..n as u32).map(|i| sets.find(i)).collect();
        walk.refresh(&roots, &mut known);
        // The shortest edge out of each component; of equals the one between the lowest points.
        let mut best: Vec<Option<TreeEdge>> = vec![None; n];
        for (i, know) in known.iter().enumerate() {
            if know.other == u32::MAX || roots[know.other as usize] == roots[i] {
                continue;
            }
            let (a, b) = (i as u32, know.other);
            let edge = TreeEdge { ends: (a.min(b), a.max(b)), weight: know.weight };
            let own = &mut best[roots[i] as usize];
            let shorter = |old: &TreeEdge| edge.weight.total_cmp(&old.weight).then(edge.ends.cmp(&old.ends)).is_lt();
            if own.as_ref().is_none_or(shorter) {
                *own = Some(edge);
            }
        }
        let before = edges.len();
        for edge in best.into_iter().flatten() {
            // Two components may choose each other; a third of equal length could close a circle.
            if sets.join(edge.ends.0, edge.ends.1) {
                edges.push(edge);
            }
        }
        assert!(edges.len() > before, "bug in fulgurite: a round of the spanning tree joined nothing");
    }
    edges.sort_by(|a, b| a.weight.total_cmp(&b.weight).then(a.ends.cmp(&b.ends)));
    edges
}

impl Walk<'_> {
    fn weight(&self, i: usize, j: usize, squared: f64) -> f64 {
        squared.sqrt().max(self.cores[i]).max(self.cores[j])
    }

    /// Edges to the nearest few points. No edge is shorter than the core distance, so one of that length is shortest.
    fn first_known(&self, i: usize, list: &[(f64, u32)]) -> Known {
        let mut known = Known { weight: f64::INFINITY, other: u32::MAX, least: self.cores[i] };
        for &(squared, j) in list {
            let weight = self.weight(i, j as usize, squared);
            if weight < known.weight && weight <= self.cores[i] {
                known = Known { weight, other: j, ..known };
            }
        }
        known
    }

    /// Looks again at the points that need it.
    fn refresh(&self, roots: &[u32], known: &mut [Known]) {
        let n = known.len();
        let valid =
            |i: usize, known: &[Known]| known[i].other != u32::MAX && roots[known[i].other as usize] != roots[i];
        let mut shortest = vec![f64::INFINITY; n];
        for i in (0..n).filter(|&i| valid(i, known)) {
            let own = &mut shortest[roots[i] as usize];
            *own = own.min(known[i].weight);
        }
        // Not `<=`: an edge of equal length exists already.
        let list: Vec<u32> = (0..n as u32)
            .filter(|&i| !valid(i as usize, known) && known[i as usize].least < shortest[roots[i as usize] as usize])
            .collect();
        let groups: Vec<f32> = roots.iter().map(|&root| root as f32).collect();
        let group = self.scanner.group();
        let found = Mutex::new(Vec::new());
        pool::run(self.scanner.threads(), list.len().div_ceil(group), &|item| {
            let range = (item * group, group.min(list.len() - item * group));
            let own = self.look(&list, range, &groups);
            found.lock().unwrap_or_else(|e| e.into_inner()).extend(own);
        });
        for (i, know) in found.into_inner().unwrap_or_else(|e| e.into_inner()) {
            known[i as usize] = know;
        }
    }

    fn look(&self, list: &[u32], range: (usize, usize), groups: &[f32]) -> Vec<(u32, Known)> {
        let (rows, d) = (self.points.data(), self.points.dim());
        let own = &list[range.0..range.0 + range.1];
        let mut lane_group: Vec<f32> = own.iter().map(|&i| groups[i as usize]).collect();
        lane_group.resize(range.1.next_multiple_of(MAX_LANES), -1.0);
        let mut fold = Outside {
            caps: &self.caps,
            groups,
            lane_group,
            half: Vec::new(),
            norms: Vec::new(),
            best: Best::default(),
        };
        let queries = Queries { rows, d, range, list: Some(list), frame: &self.frame };
        self.scanner.walk(&queries, &self.keys, 0..self.keys.len(), &mut fold);
        let scale = f64::from(self.frame.scale).powi(2);
        let mut out = Vec::with_capacity(own.len());
        for (lane, &i) in own.iter().enumerate() {
            if fold.best.best[lane] == f32::NEG_INFINITY {
                out.push((i, self.look_plainly(i, groups)));
                continue;
            }
            let (other, i_row) = (fold.best.index[lane], i as usize);
            let squared = self.scanner.distance(self.points.row(i_row), self.points.row(other as usize));
            let weight = self.weight(i_row, other as usize, squared);
            let margin = self.scanner.margin(d, &self.keys, 1.001 * f64::from(fold.norms[lane]).sqrt());
            let least = (weight * weight - 4.0 * margin / scale).max(0.0).sqrt().max(self.cores[i_row]);
            out.push((i, Known { weight, other, least }));
        }
        out
    }

    /// The exact search where products overflowed: every point outside, in f64.
    fn look_plainly(&self, i: u32, groups: &[f32]) -> Known {
        let own = i as usize;
        let mut known = Known { weight: f64::INFINITY, other: u32::MAX, least: f64::INFINITY };
        for j in (0..groups.len()).filter(|&j| groups[j] != groups[own]) {
            let weight = self.weight(own, j, self.scanner.distance(self.points.row(own), self.points.row(j)));
            if weight < known.weight || known.other == u32::MAX {
                known = Known { weight, other: j as u32, least: weight };
            }
        }
        known
    }
}

struct Outside<'a> {
    caps: &'a [f32],
    groups: &'a [f32],
    lane_group: Vec<f32>,
    half: Vec<f32>,
    norms: Vec<f32>,
    best: Best,
}

impl Fold for Outside<'_> {
    fn begin(&mut self, norms: &[f32]) {
        self.best.reset(norms.len());
        self.norms = norms.to_vec();
        self.half = norms.iter().map(|norm| 0.5 * norm).collect();
        self.half.resize(norms.len().next_multiple_of(MAX_LANES), 0.0);
    }

    fn tile(&mut self, scores: &Scores<'_>) {
        let others =
            Others { cap: self.caps, key_group: self.groups, lane_group: &self.lane_group, half_norm: &self.half };
        scores.other(&others, &mut self.best);
    }
}

//! Vector clocks: an agent's knowledge of what other agents have done.
//!
//! Agents are warps and mbarriers. Each has one component, whose value grows with every release of a warp and with
//! every phase of an mbarrier. There are four clocks, because PTX orders four different things: memory seen through the
//! generic proxy; work that is known to be finished (which a relaxed arrival also tells); and writes that a fence made
//! visible to the async proxy, in shared and in global memory.

use std::collections::BTreeMap;

/// One of the four clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Happens-before of memory.
    Memory = 0,
    /// Finished before; does not tell who sees the written data.
    Done = 1,
    /// Writes to shared memory that the async proxy may see.
    AsyncShared = 2,
    /// Writes to global memory that the async proxy may see.
    AsyncGlobal = 3,
}

/// A component: a warp or an mbarrier of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Comp {
    pub cluster: u32,
    pub index: u32,
}

type Row = [u32; 4];

/// The knowledge of one agent. Components of its own cluster are a list; those of other clusters, learned through
/// global memory only, are stored by cluster.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock {
    cluster: u32,
    own: Vec<Row>,
    far: BTreeMap<u32, Vec<Row>>,
}

fn join_rows(to: &mut Vec<Row>, from: &[Row]) {
    if to.len() < from.len() {
        to.resize(from.len(), [0; 4]);
    }
    for (a, b) in to.iter_mut().zip(from) {
        for (x, y) in a.iter_mut().zip(b) {
            *x = (*x).max(*y);
        }
    }
}

fn join_done(to: &mut Vec<Row>, from: &[Row]) {
    if to.len() < from.len() {
        to.resize(from.len(), [0; 4]);
    }
    for (a, b) in to.iter_mut().zip(from) {
        a[Part::Done as usize] = a[Part::Done as usize].max(b[Part::Done as usize]);
    }
}

impl Clock {
    pub fn new(cluster: u32) -> Self {
        Clock { cluster, ..Clock::default() }
    }

    fn rows(&self, cluster: u32) -> &[Row] {
        if cluster == self.cluster { &self.own } else { self.far.get(&cluster).map_or(&[], Vec::as_slice) }
    }
    fn rows_mut(&mut self, cluster: u32) -> &mut Vec<Row> {
        if cluster == self.cluster { &mut self.own } else { self.far.entry(cluster).or_default() }
    }

    pub fn get(&self, part: Part, comp: Comp) -> u32 {
        self.rows(comp.cluster).get(comp.index as usize).map_or(0, |row| row[part as usize])
    }

    /// Raises the known value of a component to at least `value`, in the given parts.
    pub fn raise(&mut self, parts: &[Part], comp: Comp, value: u32) {
        let rows = self.rows_mut(comp.cluster);
        if rows.len() <= comp.index as usize {
            rows.resize(comp.index as usize + 1, [0; 4]);
        }
        for &part in parts {
            let x = &mut rows[comp.index as usize][part as usize];
            *x = (*x).max(value);
        }
    }

    /// Adds everything that `other` knows.
    pub fn join(&mut self, other: &Clock) {
        join_rows(self.rows_mut(other.cluster), &other.own);
        for (&cluster, rows) in &other.far {
            join_rows(self.rows_mut(cluster), rows);
        }
    }

    /// Adds only the work that `other` knows to be finished.
    pub fn join_done(&mut self, other: &Clock) {
        join_done(self.rows_mut(other.cluster), &other.own);
        for (&cluster, rows) in &other.far {
            join_done(self.rows_mut(cluster), rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joins_take_the_larger_and_keep_clusters_apart() {
        let at = |cluster, index| Comp { cluster, index };
        let mut a = Clock::new(0);
        let mut b = Clock::new(1);
        a.raise(&[Part::Memory, Part::Done], at(0, 2), 5);
        b.raise(&[Part::Memory], at(1, 2), 7);
        b.raise(&[Part::Done], at(0, 2), 9);
        a.join_done(&b);
        assert_eq!((a.get(Part::Memory, at(0, 2)), a.get(Part::Done, at(0, 2))), (5, 9));
        assert_eq!(a.get(Part::Memory, at(1, 2)), 0);
        a.join(&b);
        assert_eq!(a.get(Part::Memory, at(1, 2)), 7);
        assert_eq!(a.get(Part::Memory, at(3, 0)), 0);
    }
}

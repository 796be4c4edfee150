//! From a spanning tree to clusters: the hierarchy, without splits that only shed a few points, and of it the clusters
//! with the most excess of mass (Campello, Moulavi and Sander 2013; lambda is 1 / distance).

use super::TreeEdge;
use crate::union::Union;

/// A merge of the single-linkage hierarchy; points are nodes below n, merge m is node n + m.
struct Merge {
    parts: (usize, usize),
    distance: f64,
    size: usize,
}

/// A part that leaves a cluster: a point, or a cluster of its own.
struct Leaf {
    parent: usize,
    point: Option<usize>,
    lambda: f64,
    size: usize,
}

/// The hierarchy of clusters; cluster 0 is everything.
pub(super) struct Condensed {
    n: usize,
    leaves: Vec<Leaf>,
    /// Parent and birth of each cluster; the first has none.
    clusters: Vec<(usize, f64)>,
}

fn merges(tree: &[TreeEdge], n: usize) -> Vec<Merge> {
    let mut sets = Union::new(n);
    // The node that a set's root stands for now.
    let mut node: Vec<usize> = (0..n).collect();
    let mut out: Vec<Merge> = Vec::with_capacity(tree.len());
    for edge in tree {
        let (a, b) = (sets.find(edge.ends.0) as usize, sets.find(edge.ends.1) as usize);
        let size = |x: usize, out: &[Merge]| if x < n { 1 } else { out[x - n].size };
        let parts = (node[a], node[b]);
        let size = size(parts.0, &out) + size(parts.1, &out);
        out.push(Merge { parts, distance: edge.weight, size });
        sets.join(a as u32, b as u32);
        node[a.min(b)] = n + out.len() - 1;
    }
    out
}

impl Condensed {
    pub fn new(tree: &[TreeEdge], n: usize, least: usize) -> Condensed {
        let merges = merges(tree, n);
        let mut this = Condensed { n, leaves: Vec::new(), clusters: vec![(usize::MAX, 0.0)] };
        // Nodes with the cluster they belong to, in breadth: clusters are numbered as they are met.
        let mut queue = std::collections::VecDeque::from([(n + merges.len() - 1, 0usize)]);
        let size = |node: usize| if node < n { 1 } else { merges[node - n].size };
        while let Some((node, cluster)) = queue.pop_front() {
            if node < n {
                continue;
            }
            let merge = &merges[node - n];
            let lambda = if merge.distance > 0.0 { 1.0 / merge.distance } else { f64::INFINITY };
            let (left, right) = merge.parts;
            let both = size(left) >= least && size(right) >= least;
            for part in [left, right] {
                if both {
                    let own = this.clusters.len();
                    this.clusters.push((cluster, lambda));
                    this.leaves.push(Leaf { parent: cluster, point: None, lambda, size: size(part) });
                    queue.push_back((part, own));
                } else if size(part) >= least {
                    queue.push_back((part, cluster));
                } else {
                    this.shed(&merges, part, cluster, lambda);
                }
            }
        }
        this
    }

    /// All points under a node leave a cluster.
    fn shed(&mut self, merges: &[Merge], node: usize, parent: usize, lambda: f64) {
        let mut rest = vec![node];
        while let Some(node) = rest.pop() {
            if node < self.n {
                self.leaves.push(Leaf { parent, point: Some(node), lambda, size: 1 });
            } else {
                rest.extend([merges[node - self.n].parts.1, merges[node - self.n].parts.0]);
            }
        }
    }

    /// Labels, probabilities, and the stability of each chosen cluster.
    pub fn clusters(&self, allow_single: bool) -> (Vec<i32>, Vec<f32>, Vec<f64>) {
        let count = self.clusters.len();
        // Infinite densities (duplicates) count as the largest finite one, so that differences exist.
        let finite = self.leaves.iter().map(|leaf| leaf.lambda).filter(|l| l.is_finite()).fold(0.0, f64::max);
        let cap = if finite > 0.0 { finite } else { 1.0 };
        let lambda = |x: f64| x.min(cap);
        let (mut stability, mut last) = (vec![0.0f64; count], vec![0.0f64; count]);
        for leaf in &self.leaves {
            stability[leaf.parent] += (lambda(leaf.lambda) - lambda(self.clusters[leaf.parent].1)) * leaf.size as f64;
            last[leaf.parent] = last[leaf.parent].max(lambda(leaf.lambda));
        }
        // Children have higher numbers: from the last on, a cluster stays unless its children hold more.
        let (mut chosen, mut below) = (vec![true; count], vec![0.0f64; count]);
        let mut best = stability.clone();
        for cluster in (0..count).rev() {
            let root = cluster == 0;
            if (root && !allow_single) || below[cluster] > stability[cluster] {
                chosen[cluster] = false;
                best[cluster] = below[cluster];
            }
            if !root {
                below[self.clusters[cluster].0] += best[cluster];
            }
        }
        // Of clusters inside each other the outermost.
        let mut owner: Vec<Option<usize>> = vec![None; count];
        for cluster in 0..count {
            let above = if cluster == 0 { None } else { owner[self.clusters[cluster].0] };
            owner[cluster] = above.or(chosen[cluster].then_some(cluster));
        }
        let outermost: Vec<usize> = (0..count).filter(|&c| owner[c] == Some(c)).collect();
        let mut number = vec![-1i32; count];
        outermost.iter().enumerate().for_each(|(label, &c)| number[c] = label as i32);
        let (mut labels, mut probabilities) = (vec![-1i32; self.n], vec![0.0f32; self.n]);
        for leaf in &self.leaves {
            if let (Some(point), Some(cluster)) = (leaf.point, owner[leaf.parent]) {
                labels[point] = number[cluster];
                let most = last[cluster];
                let share = if most > 0.0 { lambda(leaf.lambda).min(most) / most } else { 1.0 };
                probabilities[point] = share as f32;
            }
        }
        (labels, probabilities, outermost.iter().map(|&c| stability[c]).collect())
    }
}

//! Sets that grow together.

/// Union-find with path halving; the smaller root stays, so that partitions do not depend on the order of unions.
#[derive(Debug, Clone)]
pub(crate) struct Union(Vec<u32>);

impl Union {
    pub fn new(n: usize) -> Union {
        Union((0..n as u32).collect())
    }

    pub fn find(&mut self, mut x: u32) -> u32 {
        while self.0[x as usize] != x {
            self.0[x as usize] = self.0[self.0[x as usize] as usize];
            x = self.0[x as usize];
        }
        x
    }

    /// False if they were in one set already.
    pub fn join(&mut self, a: u32, b: u32) -> bool {
        let (a, b) = (self.find(a), self.find(b));
        if a == b {
            return false;
        }
        self.0[a.max(b) as usize] = a.min(b);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::Union;

    #[test]
    fn sets_join_once_and_are_named_by_their_least() {
        let mut sets = Union::new(6);
        assert!(sets.join(4, 2) && sets.join(5, 4) && !sets.join(2, 5));
        assert_eq!((0..6).map(|x| sets.find(x)).collect::<Vec<_>>(), [0, 1, 2, 3, 2, 2]);
    }
}

//! A bounded cache that drops the least recently used entry.

/// Entries, the most recently used at the front. Lookups compare linearly: there are a few hundred entries, and equal
/// problems tend to follow each other.
pub struct Lru<T> {
    entries: Vec<T>,
    capacity: usize,
}

impl<T> Lru<T> {
    /// An empty cache for this many entries.
    pub fn new(capacity: usize) -> Lru<T> {
        Lru { entries: Vec::new(), capacity: capacity.max(1) }
    }

    /// Finds the entry for which `is` holds, and moves it to the front.
    pub fn find(&mut self, is: impl Fn(&T) -> bool) -> Option<&T> {
        let at = self.entries.iter().position(is)?;
        self.entries[..=at].rotate_right(1);
        self.entries.first()
    }

    /// Adds an entry at the front.
    pub fn insert(&mut self, entry: T) {
        self.entries.truncate(self.capacity - 1);
        self.entries.insert(0, entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_that_was_not_used_longest_goes() {
        let mut lru = Lru::new(3);
        (1..=3).for_each(|n| lru.insert(n));
        assert_eq!(lru.find(|n| *n == 1), Some(&1));
        lru.insert(4);
        assert_eq!(lru.find(|n| *n == 2), None);
        assert_eq!(lru.entries.len(), 3);
        assert!([1, 3, 4].into_iter().all(|n| lru.find(|known| *known == n).is_some()));
    }
}

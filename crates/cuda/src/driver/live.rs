//! The memory that a context may use in launches: live allocations, and memory that `raw` vouched for.

use fulgurite_ptx::device::{DeviceError, Span, Token};
use std::collections::HashSet;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// The live allocations of a context.
pub(crate) struct Live(RwLock<Allocations>);

/// A read lock on [`Live`]. Nothing is freed while it exists, so memory that was found alive lives until the launch is
/// made.
pub(crate) struct Allocations {
    /// [`Token::id`] of each allocation, and of the context itself, which vouches for memory of other libraries.
    owners: HashSet<u64>,
    /// Number of frees so far: memory found alive before the last one must be checked again.
    frees: u64,
}

impl Live {
    pub fn new(context: &Token) -> Live {
        Live(RwLock::new(Allocations { owners: HashSet::from([context.id()]), frees: 0 }))
    }

    pub fn read(&self) -> RwLockReadGuard<'_, Allocations> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn insert(&self, token: &Token) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).owners.insert(token.id());
    }

    pub fn remove(&self, token: &Token) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.owners.remove(&token.id());
        all.frees += 1;
    }
}

impl Allocations {
    /// Number of frees so far.
    pub fn frees(&self) -> u64 {
        self.frees
    }

    /// Whether an allocation is alive, by [`Token::id`].
    pub fn has(&self, owner: u64) -> bool {
        self.owners.contains(&owner)
    }

    /// Rejects memory that belongs to another context or was freed.
    pub fn check(&self, span: Span) -> Result<(), DeviceError> {
        match self.has(span.owner()) {
            true => Ok(()),
            false => Err(DeviceError::Foreign { address: span.address() }),
        }
    }
}

//! Which memory a context may launch on: allocations that were not freed, and memory that `raw` vouched for.

use fulgurite_ptx::device::{DeviceError, Span, Token};
use std::collections::HashSet;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// The allocations of a context that were not freed.
pub(crate) struct Live(RwLock<Allocations>);

/// A look at [`Live`]. Nothing is freed while one exists, so memory that it has found lives until the launch is made.
pub(crate) struct Allocations {
    /// [`Token::id`] of each, and of the context itself, which vouches for memory of others.
    owners: HashSet<u64>,
    /// Frees so far: what was found before the last one must be looked for again.
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
    /// Frees so far.
    pub fn frees(&self) -> u64 {
        self.frees
    }

    /// Whether an allocation lives, by [`Token::id`].
    pub fn has(&self, owner: u64) -> bool {
        self.owners.contains(&owner)
    }

    /// Refuses memory that is not this context's, or was freed.
    pub fn check(&self, span: Span) -> Result<(), DeviceError> {
        match self.has(span.owner()) {
            true => Ok(()),
            false => Err(DeviceError::Foreign { address: span.address() }),
        }
    }
}

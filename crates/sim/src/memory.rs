//! Global memory: allocations with bounds, each with its shadow.

use crate::shadow::Shadow;
use fulgurite_ptx::device::{DeviceError, Span};
use std::collections::BTreeMap;

/// Address of the first allocation.
const BASE: u64 = 0x7f00_0000_0000;
/// Unused bytes between allocations, so that an overrun is detected.
const GUARD: u64 = 4096;
const ALIGN: u64 = 1024;

/// An allocation.
pub(crate) struct Allocation {
    pub address: u64,
    pub bytes: Vec<u8>,
    pub shadow: Shadow,
}

/// All allocations, by address.
pub(crate) struct Memory {
    map: BTreeMap<u64, Allocation>,
    next: u64,
    used: u64,
    capacity: u64,
}

impl Memory {
    pub fn new(capacity: u64) -> Self {
        Memory { map: BTreeMap::new(), next: BASE, used: 0, capacity }
    }

    pub fn allocate(&mut self, bytes: u64) -> Result<Span, DeviceError> {
        let free = self.capacity - self.used;
        if bytes > free {
            return Err(DeviceError::Memory { asked: bytes, free });
        }
        let address = self.next;
        self.next = (address + bytes + GUARD).next_multiple_of(ALIGN);
        self.used += bytes;
        // Fill with a pattern, not zeros: a kernel that relies on zeros is wrong.
        let allocation = Allocation { address, bytes: vec![0xa5; bytes as usize], shadow: Shadow::new(bytes) };
        self.map.insert(address, allocation);
        Ok(Span::new(address, bytes))
    }

    pub fn free(&mut self, address: u64) {
        if let Some(allocation) = self.map.remove(&address) {
            self.used -= allocation.bytes.len() as u64;
        }
    }

    /// The allocation that contains a run of bytes, and the run's offset in it.
    pub fn find(&mut self, address: u64, bytes: u64) -> Option<(&mut Allocation, u64)> {
        let (_, allocation) = self.map.range_mut(..=address).next_back()?;
        let offset = address - allocation.address;
        let inside = offset.checked_add(bytes)? <= allocation.bytes.len() as u64;
        inside.then_some((allocation, offset))
    }

    /// Starts a new launch: all earlier accesses are ordered before it.
    pub fn forget_accesses(&mut self) {
        self.map.values_mut().for_each(|allocation| allocation.shadow.forget());
    }
}

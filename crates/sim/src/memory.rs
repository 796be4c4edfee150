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
        let mut contents = Vec::new();
        let refused =
            || DeviceError::Host { what: "memory of the simulated GPU", bytes: Shadow::bytes_of(bytes) + bytes };
        contents.try_reserve_exact(bytes as usize).map_err(|_| refused())?;
        let shadow = Shadow::try_new(bytes).ok_or_else(refused)?;
        // A pattern, not zeros: a kernel that relies on zeros is wrong.
        contents.resize(bytes as usize, 0xa5);
        let address = self.next;
        self.next = (address + bytes + GUARD).next_multiple_of(ALIGN);
        self.used += bytes;
        self.map.insert(address, Allocation { address, bytes: contents, shadow });
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

#[cfg(test)]
mod tests {
    use super::*;

    /// More than the process can have, below the capacity: an error with the bytes, and what was there is still there.
    #[test]
    fn memory_that_the_process_cannot_have_is_refused() {
        let mut memory = Memory::new(u64::MAX);
        let held = memory.allocate(64).unwrap();
        let refused = memory.allocate(1 << 60).unwrap_err();
        let text = refused.to_string();
        assert!(text.starts_with("memory of the simulated GPU needs 1"), "{text}");
        assert!(matches!(refused, DeviceError::Host { bytes, .. } if bytes > 1 << 60));
        assert!(memory.find(held.address(), 64).is_some() && memory.allocate(64).is_ok());
    }
}

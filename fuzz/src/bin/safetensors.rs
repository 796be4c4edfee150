//! Any bytes as a safetensors file: read or refused with a reason, and what was read is written and read again.

#![no_main]

use fulgurite_cli::io::{Stored, safetensors};
use fulgurite_fuzz::limit::{Limited, with_at_most};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// No file of the fuzzer's size is a reason to ask for more.
const MOST_BYTES: usize = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let tensors = match with_at_most(MOST_BYTES, || safetensors::decode(bytes)) {
        Ok(tensors) => tensors,
        Err(refused) => return assert!(!refused.is_empty()),
    };
    let known: Vec<_> = tensors
        .iter()
        .filter_map(|(name, stored)| match stored {
            Stored::Tensor(tensor) => Some((name.clone(), tensor)),
            _ => None,
        })
        .collect();
    let again = safetensors::encode(&known).expect("what was read can be written");
    let again = safetensors::decode(&again).expect("what was written can be read");
    assert_eq!(again.len(), known.len());
});

//! Any bytes as a `.npy` file: read or refused with a reason, and what was read is written and read again.

#![no_main]

use fulgurite_cli::io::{Stored, npy};
use fulgurite_fuzz::limit::{Limited, with_at_most};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// No file of the fuzzer's size is a reason to ask for more.
const MOST_BYTES: usize = 1 << 20;

fuzz_target!(|bytes: &[u8]| match with_at_most(MOST_BYTES, || npy::decode(bytes)) {
    Ok(Stored::Tensor(tensor)) => {
        // numpy has no bf16, so not everything that was read can be written.
        if let Ok(again) = npy::encode(&tensor) {
            npy::decode(&again).expect("what was written can be read");
        }
    }
    Ok(_) => {}
    Err(refused) => assert!(!refused.is_empty()),
});

//! Any bytes as a saved cache: read or refused with a reason, and what was read is written and read again.

#![no_main]

use fulgurite_cli::cache::{decode, encode};
use fulgurite_fuzz::limit::{Limited, with_at_most};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// No file of the fuzzer's size is a reason to ask for more.
const MOST_BYTES: usize = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    match with_at_most(MOST_BYTES, || decode(bytes)) {
        Err(refused) => assert!(!refused.is_empty()),
        Ok(cache) => {
            let again = encode(&cache).expect("what was read can be written");
            assert_eq!(decode(&again).expect("what was written can be read").len(), cache.len());
        }
    }
});

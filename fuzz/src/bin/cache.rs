//! Any bytes as a saved cache: read or refused with a reason, and what was read is written and read again.

#![no_main]

use fulgurite_cli::cache::{decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match decode(bytes) {
        Err(refused) => assert!(!refused.is_empty()),
        Ok(cache) => {
            let again = encode(&cache).expect("what was read can be written");
            assert_eq!(decode(&again).expect("what was written can be read").len(), cache.len());
        }
    }
});

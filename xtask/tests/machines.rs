//! A machine adds loads, products and a schedule. Masks, softmax, modifiers and the epilogue exist once, in `parts`.

use std::path::Path;

/// Kernels of one machine, below `crates/kernels/src`.
const MACHINES: &[(&str, &[&str])] = &[
    ("attention/forward/mma_sync", PARTS),
    ("attention/forward/tcgen05", PARTS),
    ("attention/backward/mma_sync", PARTS_OF_GRADIENTS),
];

/// Operations of masks, softmax, modifiers and the epilogue, which a machine's own files do not contain.
const SHARED: &[&str] = &["NEG_INFINITY", ".exp2(", ".log2(", ".recip(", ".tanh(", "LOG2_E", "LN_2", "fetch_add"];

/// Modules from which a machine must import instead, whatever else the same `use` imports.
const PARTS: &[&str] = &["parts::epilogue::", "parts::softmax::", "scoring::", "parts::mask::", "parts::nonfinite::"];

/// The same for gradients.
const PARTS_OF_GRADIENTS: &[&str] =
    &["parts::mask::", "backward::walk::", "backward::modifiers::", "backward::tiles::"];

#[test]
fn a_machine_has_no_mathematics_of_its_own() {
    for (folder, parts) in MACHINES {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/kernels/src").join(folder);
        let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let text: String = files.map(|file| std::fs::read_to_string(file).unwrap()).collect();
        for word in SHARED {
            assert!(!text.contains(word), "{}: `{word}` belongs to the shared parts", folder.display());
        }
        for part in *parts {
            assert!(text.contains(part), "{}: `{part}` is not used", folder.display());
        }
    }
}

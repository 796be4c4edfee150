//! `sim` runs kernels on a simulator; wrong calls are refused in one line.

use crate::common::{folder, refuses, succeeds};

#[test]
fn kernels_run_clean_and_are_counted() {
    let folder = folder("sim");
    let out = succeeds(&folder, &["sim", "vector_add", "-n", "300", "--seed", "3", "--counters"]);
    assert!(out.starts_with("vector_add: x f32 [300], y f32 [300], 2 CTAs, seed 3: clean\n"), "{out}");
    assert!(out.contains("global bytes") && out.contains("3600"), "{out}");
    let out = succeeds(&folder, &["sim", "row_softmax", "-m", "3", "-n", "200"]);
    assert!(out.contains("x f32 [3, 200], 3 CTAs, seed 0: clean"), "{out}");
    let out = succeeds(&folder, &["sim", "gemm-f16-tn", "-m", "100", "-n", "40", "-k", "72", "--blocks", "1"]);
    assert!(out.contains("clean"), "{out}");
    let args =
        ["sim", "attention-bf16-d64-causal", "--q-len", "70", "--k-len", "90", "--heads", "2", "--kv-heads", "1"];
    assert!(succeeds(&folder, &args).contains("clean"));
    // Kernels of features, with the tensors that they read; and the results as JSON.
    let args = ["sim", "attention-sync-bf16-d64-documents", "--q-len", "70", "--k-len", "90", "--json"];
    let results: serde_json::Value = serde_json::from_str(&succeeds(&folder, &args)).unwrap();
    assert_eq!(results["findings"].as_array().map(Vec::len), Some(0));
    assert!(results["roles"]["compute"]["tensor FLOP"].as_u64().unwrap() > 0);
}

#[test]
fn timelines_are_written() {
    let folder = folder("sim-trace");
    let out = succeeds(&folder, &["sim", "gemm-bf16-nt", "-m", "128", "-k", "128", "--trace", "out.svg"]);
    assert!(out.contains("out.svg: about"), "{out}");
    let picture = std::fs::read_to_string(folder.join("out.svg")).unwrap();
    assert!(picture.contains("tensor cores") && picture.contains("multiply 1"));
    succeeds(&folder, &["sim", "vector_add", "--trace", "out.json"]);
    let trace: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("out.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 3);
}

#[test]
fn wrong_calls() {
    let folder = folder("sim-wrong");
    let line = "there is no kernel `gem`; `fulgurite kernel list` names all";
    refuses(&folder, &["sim", "gem"], line);
    refuses(&folder, &["sim", "vector_add", "-n", "0"], "`n` is 0, allowed: 1 to 2^20");
    refuses(
        &folder,
        &["sim", "attention-bf16-d64-full", "--heads", "3", "--kv-heads", "2"],
        "`kv-heads` is 2, allowed: divisors of the 3 heads of queries",
    );
}

//! `explain` needs no GPU; `tune` refuses in one line where there is none, and before anything is measured.

use crate::common::{folder, fulgurite, refuses, succeeds};
use fulgurite::{Choice, Settings, engine_with};
use serde_json::Value;

fn explained(args: &[&str]) -> Value {
    let folder = folder(&format!("explain-{}", args.join("-").replace(['/', ','], "-")));
    let text = succeeds(&folder, &[&["explain", "--json"], args].concat());
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_problem_is_explained_without_a_gpu() {
    let found = explained(&["--causal", "--q-len", "2048"]);
    let on_gpu = &found["on_gpu"];
    assert_eq!(on_gpu["kernel"], "attention_forward");
    assert!(on_gpu["tile_config"].as_str().unwrap().starts_with("groups=2 cols=128"), "{found}");
    // 16 tiles of 128 rows see 1 to 16 blocks of 128 keys each, in 16 heads.
    assert_eq!(on_gpu["blocks"], 16 * (16 * 17 / 2));
    // A block is 4 x 128 x 128 x 128 FLOP, of which a multiprocessor does 4096 a cycle.
    let tensor = on_gpu["units"].as_array().unwrap().iter().find(|unit| unit["name"] == "tensor").unwrap();
    assert_eq!(tensor["cycles_a_block"], 2048.0);
    assert!(on_gpu["bound_tflops"].as_f64().unwrap() < 989.5, "{found}");
    assert!(found["engines"].as_array().unwrap().iter().any(|line| line.as_str().unwrap().contains("runs it")));
}

#[test]
fn gradients_are_explained_without_a_gpu() {
    let found = explained(&["--backward", "--q-len", "4096"]);
    let on_gpu = &found["on_gpu"];
    assert_eq!((&found["pass"], &on_gpu["kernel"]), (&"backward".into(), &"attention_backward".into()));
    assert!(on_gpu["tile_config"].as_str().unwrap().starts_with("share=keys rows=80 adds=engine"), "{found}");
    assert!(on_gpu["why"].as_str().unwrap().contains("TMA adds d_q"), "{found}");
    // 32 tiles of 128 keys see 52 steps of 80 queries each, the last not whole, in 16 heads.
    assert_eq!(on_gpu["blocks"], 16 * 32 * 52);
    // Five products of 2 x 128 x 80 x 128 FLOP, of which a multiprocessor does 4096 a cycle.
    let tensor = on_gpu["units"].as_array().unwrap().iter().find(|unit| unit["name"] == "tensor").unwrap();
    assert_eq!(tensor["cycles_a_block"], 3200.0);
    // o, d_o, d_q, and sums twice, of 16 x 4096 rows.
    let around = (16 * 4096) as f64 * (3.0 * 2.0 + 2.0 * 4.0) * 128.0 / 4.8e12 * 1e6;
    assert!((on_gpu["other_launches_us"].as_f64().unwrap() / around - 1.0).abs() < 1e-3, "{found}");
    assert!(on_gpu["bound_tflops"].as_f64().unwrap() < 989.5, "{found}");
    // Another mask, other cuts: half the steps and those on the diagonal.
    let causal = explained(&["--backward", "--causal", "--q-len", "512", "--heads", "2"]);
    assert_eq!(causal["on_gpu"]["tile"], serde_json::json!([128, 64]));
    assert_eq!(causal["on_gpu"]["blocks"], 2 * (8 + 6 + 4 + 2));
    assert!(causal["on_gpu"]["why"].as_str().unwrap().contains("adapted"), "{causal}");
    let softcap = explained(&["--backward", "--softcap", "30", "--q-len", "512", "--window", "40,0"]);
    let cycles = softcap["on_gpu"]["units"][0]["cycles_a_block"].as_f64().unwrap();
    assert!(cycles >= 1280.0, "at least the products of 64 keys and 64 queries: {softcap}");
    let f32 = explained(&["--backward", "--dtype", "f32"]);
    assert!(f32["gpu_refused"].as_str().unwrap().contains("does not have dtype f32"), "{f32}");
}

/// Few queries wait for memory: as many bytes as their keys have.
#[test]
fn few_queries_are_bound_by_memory() {
    let args = ["--q-len", "1", "--k-len", "8192", "--heads", "32", "--kv-heads", "8", "--batch", "32"];
    let found = explained(&args);
    let on_gpu = &found["on_gpu"];
    assert_eq!(on_gpu["kernel"], "attention_decode");
    assert_eq!(on_gpu["units"][0]["name"], "global memory");
    let bytes = 32.0 * 8.0 * 8192.0 * 128.0 * 2.0 * 2.0;
    let least = bytes / 4.8e12 * 1e6;
    let bound = on_gpu["bound_us"].as_f64().unwrap();
    assert!((least..1.02 * least).contains(&bound), "{bound} us of {least}");
}

#[test]
fn what_a_gpu_lacks_is_said() {
    let found = explained(&["--dtype", "f32"]);
    let refused = found["gpu_refused"].as_str().unwrap();
    assert!(refused.contains("does not have dtype f32") && refused.contains("cpu"), "{refused}");
}

#[test]
fn the_unit_of_a_precision_is_said() {
    for (precision, words) in [("int8", "INT8 summed in 32 bits"), ("nvfp4", "products on")] {
        let found = explained(&["--precision", precision, "--engine", "cpu"]);
        let lines: Vec<&str> = found["engines"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert!(lines.iter().any(|line| line.contains("runs it") && line.contains(words)), "{lines:?}");
        assert!(found["gpu_refused"].as_str().unwrap().contains(&format!("precision {precision}")), "{found}");
    }
}

#[test]
fn wrong_calls_are_refused() {
    let folder = folder("explain-wrong");
    refuses(&folder, &["tune", "--dims", "65"], "`--dims` has 65, allowed: 64, 96, 128, 192, 256");
    refuses(&folder, &["tune", "--backward", "--dims", "65"], "`--dims` has 65, allowed: 64, 96, 128, 192, 256");
    if engine_with(Choice::Cuda, &Settings::default()).is_err() {
        let done = fulgurite(&folder, &["tune"]);
        assert_eq!((done.code, done.err.lines().count()), (1, 1), "a missing GPU is no wrong call: {}", done.err);
        assert!(done.err.starts_with("error: no device: "), "{}", done.err);
    }
    refuses(&folder, &["tune", "--lens", "7"], "`--lens` has 7, allowed: 512, 1024, 2048, 8192");
    let done = fulgurite(&folder, &["explain", "--heads", "3", "--kv-heads", "2"]);
    assert_eq!(done.code, 2);
    assert!(done.err.starts_with("error: `heads`: 3 query heads over 2 key/value heads"), "{}", done.err);
}

/// The engine `sim:ARCH` names the architecture.
#[test]
fn any_architecture_is_explained() {
    let found = explained(&["--q-len", "1024", "--head-dim", "64", "--engine", "sim:sm_89"]);
    assert_eq!((&found["arch"], &found["gpu"]), (&"sm_89".into(), &"L40S".into()));
    let on_gpu = &found["on_gpu"];
    assert!(on_gpu["tile_config"].as_str().unwrap().starts_with("blocks=2 cols=80"), "{found}");
    // 8 tiles of 128 rows see 13 blocks of 80 keys each, in 16 heads; an SM does 1024 FLOP a cycle.
    assert_eq!(on_gpu["blocks"], 16 * 8 * 13);
    let tensor = on_gpu["units"].as_array().unwrap().iter().find(|unit| unit["name"] == "tensor").unwrap();
    assert_eq!(tensor["cycles_a_block"], (4 * 128 * 80 * 64) as f64 / 1024.0);
}

/// A ring and an exchange of heads, with the bytes that the Python package counts (`python/tests/test_distributed.py`).
#[test]
fn ranks_are_predicted_without_gpus() {
    let base = ["--ranks", "8", "--q-len", "131072", "--heads", "32", "--kv-heads", "8", "--causal"];
    let found = explained(&base);
    // 16384 rows of 8 heads, 128 + 128 elements of 2 bytes.
    let kv = 16384 * 8 * 256 * 2u64;
    assert_eq!(found["ring"]["bytes_sent"], serde_json::json!({ "keys": 7 * kv, "gradients": 0, "heads": 0 }));
    let exchanged = (16384 * 32 * 256 * 2 + kv) / 8 * 7;
    assert_eq!(found["ulysses"]["Ok"]["bytes_sent"]["heads"], exchanged);
    let us = |found: &Value, name: &str| found[name]["us"].as_f64().unwrap();
    assert!(us(&found, "ring") * 8.0 < 1.1 * found["one_us"].as_f64().unwrap(), "{found}");
    let far = explained(&[&base[..], &["--link", "0.5"]].concat());
    assert!(us(&far, "ring") > 7.0 * (kv as f64 / 0.5e3) && far["ring"]["exposed_us"].as_f64() > Some(0.0), "{far}");
    let back = explained(&[&base[..], &["--backward", "--link", "ib"]].concat());
    assert_eq!(back["ring"]["bytes_sent"]["gradients"], 8 * 2 * kv);
    // 8 steps of 2 ms. Messages take longer: 0.5 ms at this rate, after 2.5 ms.
    let steps = explained(&[&base[..], &["--link", "134.217728", "--latency", "2500", "--step-ms", "2,2"]].concat());
    let us = |name: &str| steps["ring"][name].as_f64().unwrap();
    assert!((us("us") - (7.0 * 3000.0 + 2000.0)).abs() < 1e-6 && us("kernel_us") == 16000.0, "{steps}");
    let folder = folder("explain-ranks");
    let text = succeeds(&folder, &[&["explain"], &base[..]].concat());
    assert!(text.contains("  ring ") && text.contains("MB sent by each rank"), "{text}");
    for (args, message) in [
        (&["--ranks", "0"][..], "4096 rows on 0 ranks"),
        (&["--ranks", "3"], "4096 rows on 3 ranks of two equal chunks each"),
        (&["--ranks", "2", "--k-len", "7"], "leave --k-len out"),
        (&["--ranks", "2", "--window", "4,0"], "leave --window out"),
        (&["--ranks", "2", "--link", "wire"], "allowed: nvlink, ib, or GB/s above 0"),
        (&["--link", "ib"], "--ranks"),
        (&["--ranks", "2", "--step-ms", "1"], "allowed: FIRST,LATER in ms above 0, such as 3.5,1.8"),
        (&["--ranks", "2", "--latency", "0"], "allowed: a number above 0"),
    ] {
        let done = fulgurite(&folder, &[&["explain"], args].concat());
        assert!(done.code == 2 && done.err.contains(message), "{args:?}: {}", done.err);
    }
}

//! `bench`, `check` and `doctor` say what they found.

use crate::common::{folder, fulgurite, refuses, succeeds};
use serde_json::Value;
use std::fs;

#[test]
fn bench_writes_its_report() {
    let folder = folder("bench");
    let shown = succeeds(&folder, &["bench", "--quick", "--engine", "oracle", "--repeats", "1"]);
    assert!(shown.ends_with("report: out/bench.html, out/bench.svg, out/bench.json\n"), "{shown}");
    let read = |name: &str| fs::read_to_string(folder.join("out").join(name)).unwrap();
    let results: Value = serde_json::from_str(&read("bench.json")).unwrap();
    let cells = results["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 16); // two passes, dtypes, masks and lengths
    for cell in cells {
        assert!(cell["gflops"].as_f64().unwrap() > 0.0);
        for check in cell["checks"].as_array().unwrap() {
            assert_eq!(check["ok"], true, "{cell}");
        }
    }
    assert_eq!(results["command"], "fulgurite bench --quick --engine oracle --repeats 1");
    let (page, picture) = (read("bench.html"), read("bench.svg"));
    assert!(picture.starts_with("<svg") && page.contains(picture.trim_end()));
    for outside in ["<script", "<link", "src=\"http", "@import"] {
        assert!(!page.contains(outside), "the page must stand alone: {outside}");
    }
}

#[test]
fn bench_prints_json_and_takes_a_grid() {
    let folder = folder("bench_json");
    let grid =
        ["--dims", "8", "--lens", "70,3", "--dtypes", "f16", "--tokens", "80", "--width", "16", "--forward-only"];
    let out = succeeds(&folder, &[&["bench", "--json", "--engine", "oracle", "--out", "deep/er"], &grid[..]].concat());
    let results: Value = serde_json::from_str(&out).unwrap();
    let cells = results["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 4);
    assert_eq!((&cells[1]["batch"], &cells[1]["heads"]), (&Value::from(26), &Value::from(2)));
    assert!(folder.join("deep/er/bench.html").exists());
}

#[test]
fn every_engine_passes_bench_and_check() {
    let folder = folder("best");
    succeeds(&folder, &["bench", "--quick"]);
    // The table of cases runs on every engine in those engines' own tests.
    succeeds(&folder, &["check", "--long", "8", "--seed", "1", "--case", "random"]);
}

#[test]
fn check_judges_every_feature() {
    let folder = folder("check");
    let shown =
        succeeds(&folder, &["check", "--engine", "oracle", "--dtypes", "f32,bf16", "--long", "2", "--seed", "5"]);
    for feature in fulgurite_core::cases::FEATURES.iter().chain(&fulgurite_cli::variants::check::FEATURES) {
        assert!(shown.contains(&format!(" {feature} ")), "{feature}: {shown}");
    }
    assert!(shown.contains("5 random cases for each dtype, seed 5; repeat them with --seed 5"), "{shown}");
    assert!(shown.contains("comparisons are within the tolerance"), "{shown}");
    let out = succeeds(&folder, &["check", "--engine", "oracle", "--dtypes", "f16", "--json"]);
    let results: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(results["ok"], true);
    let rows = fulgurite_core::cases::FEATURES.len() + fulgurite_cli::variants::check::FEATURES.len();
    assert_eq!(results["features"].as_array().unwrap().len(), rows);
}

#[test]
fn check_judges_what_is_asked_for() {
    let folder = folder("check_case");
    let check =
        |case: &'static str| ["check", "--engine", "cpu", "--dtypes", "f32", "--json", "--long", "3", "--case", case];
    let judged = |case| {
        let results: Value = serde_json::from_str(&succeeds(&folder, &check(case))).unwrap();
        let rows = results["features"].as_array().unwrap().iter();
        let judged = rows.filter(|row| !row["columns"].as_array().unwrap().is_empty());
        (
            judged.map(|row| row["feature"].as_str().unwrap().to_string()).collect::<Vec<_>>(),
            results["comparisons"].clone(),
        )
    };
    let (features, comparisons) = judged("parallax");
    assert_eq!(features, ["parallax"]);
    assert!(comparisons.as_u64().unwrap() > 0);
    // One that has no feature of the table.
    let plain = ["check", "--engine", "cpu", "--dtypes", "f32", "--long", "1", "--seed", "39", "--case", "random 39"];
    let shown = succeeds(&folder, &plain);
    assert!(shown.contains("\n1 random cases for each dtype") && shown.ends_with("within the tolerance\n"), "{shown}");
    let (features, comparisons) = judged("random");
    assert!(!features.is_empty() && !features.contains(&"parallax".to_string()), "{features:?}");
    assert!((6..60).contains(&comparisons.as_u64().unwrap()), "{comparisons}");
    let fixed = ["check", "--engine", "sim", "--order", "fixed", "--dtypes", "bf16", "--case", "one "];
    let shown = succeeds(&folder, &fixed);
    assert!(shown.ends_with("within the tolerance\n"), "{shown}");
    let refused = succeeds(&folder, &["check", "--engine", "oracle", "--dtypes", "f32", "--case", "parallax"]);
    assert!(refused.ends_with("nothing was compared: every case was refused\n"), "{refused}");
    refuses(
        &folder,
        &check("no such case"),
        "no case has `no such case` in its name; see `fulgurite check --list`; cases called `random` exist only with `--long N`",
    );
}

#[test]
fn doctor_names_the_engine() {
    let folder = folder("doctor");
    let shown = succeeds(&folder, &["doctor"]);
    assert!(shown.contains("runs it, the fastest on this machine that can"), "{shown}");
    let found: Value = serde_json::from_str(&succeeds(&folder, &["doctor", "--json", "--engine", "oracle"])).unwrap();
    assert_eq!(found["engine"]["asked"], "oracle");
    assert_eq!(found["why"].as_array().unwrap().last().unwrap(), "oracle: runs it, it was asked for");
    let missing = if cfg!(target_arch = "x86_64") { "cpu:neon" } else { "cpu:avx2" };
    let done = fulgurite(&folder, &["doctor", "--engine", missing]);
    assert_eq!(done.code, 1, "the call is right, this machine cannot");
    assert!(done.err.starts_with(&format!("error: `engine` is {missing}, this machine has: ")), "{}", done.err);
}

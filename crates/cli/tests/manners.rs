//! Completions, manual pages, lists, JSON with results; and that the commands in documents exist.

use crate::common::{folder, fulgurite, normal, succeeds, write};
use clap::Parser;
use fulgurite::DType;
use fulgurite_cli::args::Args;
use fulgurite_core::random::Rng;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn json(folder: &Path, args: &[&str]) -> Value {
    serde_json::from_str(&succeeds(folder, args)).unwrap()
}

#[test]
fn shells_and_manuals_know_every_command() {
    let folder = folder("manners");
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = succeeds(&folder, &["completions", shell]);
        assert!(script.contains("sim-vs-gpu") && script.contains("head-dim"), "{shell}");
    }
    assert_eq!(fulgurite(&folder, &["completions", "tcsh"]).code, 2);
    let said = succeeds(&folder, &["man", "pages"]);
    assert!(said.ends_with("pages in pages\n"), "{said}");
    for name in ["fulgurite", "fulgurite-explain", "fulgurite-kernel-assemble", "fulgurite-cluster-kmeans"] {
        let page = std::fs::read_to_string(folder.join(format!("pages/{name}.1"))).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".SH OPTIONS"), "{name}");
    }
    std::fs::write(folder.join("file"), "").unwrap();
    let done = fulgurite(&folder, &["man", "file/pages"]);
    assert_eq!((done.code, done.err.lines().count()), (2, 1), "{}", done.err);
}

#[test]
fn listed_cases_can_be_chosen() {
    let folder = folder("manners-list");
    let names = json(&folder, &["check", "--list", "--dtypes", "f32", "--json"]);
    let names: Vec<&str> = names.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(names.len() > 50 && names.iter().any(|name| name.starts_with("parallax, seed ")), "{names:?}");
    assert_eq!(succeeds(&folder, &["check", "--list", "--dtypes", "f32"]).lines().count(), names.len());
    let found = json(&folder, &["check", "--case", names[0], "--dtypes", "f32", "--engine", "cpu", "--json"]);
    assert!(found["ok"] == true && found["comparisons"].as_u64().unwrap() > 0, "{found}");
    assert_eq!(json(&folder, &["check", "--list", "--case", "no such case", "--json"]), serde_json::json!([]));
}

#[test]
fn json_has_the_results() {
    let folder = folder("manners-json");
    write(&folder, "rows.safetensors", &[("points", &normal(&mut Rng::new(1), DType::F32, &[30, 4]))]);
    let kmeans = ["cluster", "kmeans", "rows.safetensors", "-k", "3", "--json"];
    let found = json(&folder, &kmeans);
    assert_eq!(found["results"]["labels"].as_array().unwrap().len(), 30);
    assert_eq!(found["results"]["centroids"][2].as_array().unwrap().len(), 4);
    let found = json(&folder, &["neighbors", "rows.safetensors", "-k", "2", "--json"]);
    assert!(found["results"]["rows"][29][1].is_u64() && found["results"]["distances"][0][0].is_f64(), "{found}");
    let found = json(&folder, &["svd", "rows.safetensors", "-k", "2", "--centred", "--json"]);
    assert_eq!(found["explained_variance_ratio"].as_array().unwrap().len(), 2);
    assert_eq!(found["results"]["components"].as_array().unwrap().len(), 2);
    // In files they need not be printed.
    let found = json(&folder, &[&kmeans[..], &["-o", "out.safetensors"]].concat());
    assert!(found["results"].is_null() && found["written_to"] == "out.safetensors", "{found}");
    let said = succeeds(&folder, &["cluster", "kmeans", "rows.safetensors", "-k", "3"]);
    assert!(said.contains("not written; give -o"), "{said}");
}

#[test]
fn doctor_looks_for_gpus_tools_and_folders() {
    let folder = folder("manners-doctor");
    let found = json(&folder, &["doctor", "--json"]);
    let none = found["no_gpu"].is_string();
    assert_eq!(none, found["gpus"].as_array().unwrap().is_empty(), "{found}");
    assert!(found["assembler"]["ptxas"].is_string() != found["assembler"]["missing"].is_string(), "{found}");
    let said = succeeds(&folder, &["doctor"]);
    for words in ["gpu    ", "assembler    ", "kernel cache    ", "engine    ", "runs it"] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

/// Drawn topics leave something to skip; normal numbers do not.
#[test]
fn skipping_has_something_to_skip() {
    let folder = folder("manners-skip");
    let share = |data: &str| {
        let size = ["--causal", "--q-len", "512", "--heads", "1", "--head-dim", "64", "--dtype", "f32"];
        let skip = ["explain", "--skip", "lambda:1e-3,tile:64x64", "--data", data, "--json"];
        let found = json(&folder, &[&skip[..], &size].concat());
        found["all"]["kept"].as_f64().unwrap() / found["all"]["visible"].as_f64().unwrap()
    };
    assert_eq!(share("normal"), 1.0);
    assert!(share("topics") < 0.9, "{}", share("topics"));
}

/// Markdown files below a folder.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|end| end == "md") {
            found.push(path);
        }
    }
}

/// The calls of the command in the fenced blocks of a page.
fn calls(text: &str) -> Vec<Vec<String>> {
    let (mut found, mut fenced) = (Vec::new(), false);
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        // What a call does stands two spaces behind it.
        let line = line.trim_start().trim_start_matches("$ ").split("  ").next().unwrap_or_default().trim();
        let call = line.strip_prefix("fulgurite ").or_else(|| line.strip_prefix("cargo run --release -- "));
        if let Some(call) = call.filter(|call| fenced && !call.contains(['|', '\\'])) {
            found.push(call.split_whitespace().map(|word| word.trim_matches('"').to_string()).collect());
        }
    }
    found
}

#[test]
fn commands_in_documents_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    pages(&root.join("docs/guide"), &mut files);
    let (mut tried, mut wrong) = (0, Vec::new());
    for file in files {
        for call in calls(&std::fs::read_to_string(&file).unwrap()) {
            tried += 1;
            if let Err(e) = Args::try_parse_from(std::iter::once("fulgurite").chain(call.iter().map(String::as_str)))
                && e.use_stderr()
            {
                wrong.push(format!(
                    "{}: {call:?}: {}",
                    file.display(),
                    e.to_string().lines().next().unwrap_or_default()
                ));
            }
        }
    }
    assert!(tried > 15, "{tried} calls were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(calls("```sh\n$ fulgurite a --b 1   # c\n```\nfulgurite d\n"), [["a", "--b", "1"]]);
}

#[test]
fn pages_are_written_and_need_nothing_else() {
    let folder = folder("manners-open");
    let said = succeeds(&folder, &["sim", "gemm-bf16-nt", "-m", "128", "-n", "128", "-k", "64", "--open"]);
    assert!(said.contains("page: out"), "{said}");
    let said = succeeds(&folder, &["explain", "--causal", "--q-len", "1024", "--open"]);
    assert!(said.contains("page: out"), "{said}");
    for (name, part) in [("sim", "<svg"), ("explain", "class=\"bar\"")] {
        let page = std::fs::read_to_string(folder.join(format!("out/{name}.html"))).unwrap();
        assert!(page.contains(part), "{name}");
        for outside in ["src=", "href=", "url("] {
            assert!(!page.contains(outside), "{name} refers to something with {outside}");
        }
    }
    // JSON stays JSON.
    json(&folder, &["explain", "--open", "--json"]);
}

#[test]
fn bench_is_compared_with_an_earlier_run() {
    let folder = folder("manners-compare");
    let quick = ["bench", "--quick", "--attention-only", "--forward-only", "--dtypes", "f32", "--lens", "128"];
    succeeds(&folder, &[&quick[..], &["--out", "old"]].concat());
    let said = succeeds(&folder, &[&quick[..], &["--compare", "old/bench.json"]].concat());
    assert!(said.contains("beside old/bench.json") && said.contains("geometric mean"), "{said}");
    let found = json(&folder, &[&quick[..], &["--compare", "old/bench.json", "--json"]].concat());
    let rows = found["beside"][0]["rows"].as_array().unwrap();
    assert!(
        !rows.is_empty() && rows.iter().all(|row| row["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0)),
        "{found}"
    );
    std::fs::write(folder.join("wrong.json"), "{}").unwrap();
    let done = fulgurite(&folder, &[&quick[..], &["--compare", "wrong.json"]].concat());
    assert!(done.code == 2 && done.err.contains("`--compare` is wrong.json, allowed: a bench.json"), "{}", done.err);
    // Where there is no torch, the machine lacks something: the call was right.
    let done = fulgurite(&folder, &[&quick[..], &["--against", "torch"]].concat());
    assert!(done.code == 0 || (done.code == 1 && done.err.contains("pip install torch")), "{}", done.err);
}

#[test]
fn help_fits_80_columns() {
    for args in [&["--help"][..], &["bench", "--help"], &["explain", "--help"], &["sim", "--help"]] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fulgurite"));
        let output = command.args(args).env("COLUMNS", "80").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
        assert!((20..=100).contains(&widest), "{args:?}: {widest} columns");
    }
}

#[test]
fn f64_of_numpy_is_read_with_a_note() {
    let folder = folder("manners-f64");
    let numbers: Vec<u8> = (0..8 * 4).flat_map(|i| (f64::from(i) / 7.0).sin().to_le_bytes()).collect();
    let header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 8, 1, 4), }\n";
    let head = [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes()].concat();
    for name in ["q", "k", "v"] {
        std::fs::create_dir_all(folder.join("in")).unwrap();
        std::fs::write(folder.join(format!("in/{name}.npy")), [&head[..], &numbers].concat()).unwrap();
    }
    let done = fulgurite(&folder, &["run", "in", "-o", "out", "--json"]);
    assert_eq!((done.code, done.err.lines().count()), (0, 3), "{}", done.err);
    assert!(done.err.lines().all(|line| line.starts_with("note: ") && line.ends_with("is f64 and is read as f32")));
}

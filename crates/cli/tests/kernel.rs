//! `kernel` lists, prints and assembles; wrong calls are refused in one line.
//!
//! Assembling needs `ptxas`: the variable PTXAS names it, as `cargo xtask test` does. Without it those tests say
//! that they were skipped.

use crate::common::{Done, folder, refuses, succeeds};
use serde_json::Value;
use std::process::Command;

/// Runs the command with none of the variables that lead to tools, but for those given.
fn with(args: &[&str], variables: &[(&str, &str)]) -> Done {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulgurite"));
    for name in ["PTXAS", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX"] {
        command.env_remove(name);
    }
    let output = command.args(args).envs(variables.iter().copied()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Done { code: output.status.code().expect("no signal"), out: text(output.stdout), err: text(output.stderr) }
}

/// The assembler, if the tests were given one.
fn ptxas() -> Option<String> {
    let found = std::env::var("PTXAS").ok().filter(|path| !path.is_empty());
    if found.is_none() {
        println!("skipped: the variable PTXAS does not name an assembler");
    }
    found
}

#[test]
fn kernels_are_listed() {
    let folder = folder("kernel-list");
    let shown = succeeds(&folder, &["kernel", "list"]);
    assert!(shown.contains("vector_add") && shown.contains("gemm-bf16-nt") && shown.contains("sm_90a"), "{shown}");
    let listing: Value = serde_json::from_str(&succeeds(&folder, &["kernel", "list", "--json"])).unwrap();
    assert_eq!(listing["arch"], "sm_90a");
    let kernels = listing["kernels"].as_array().unwrap();
    assert!(kernels.len() >= 9, "{listing}");
    // Hopper builds every kernel but those of Blackwell.
    for kernel in kernels {
        let name = kernel["name"].as_str().unwrap();
        let blackwell = ["-tensor-", "gemm-pair-", "gemm-mxfp8", "gemm-nvfp4", "gemm-claims-"]
            .iter()
            .any(|part| name.contains(part));
        assert_eq!(kernel["refused"].is_string(), blackwell, "{kernel}");
    }

    let ampere = succeeds(&folder, &["kernel", "list", "--json", "--arch", "sm_80"]);
    let ampere: Value = serde_json::from_str(&ampere).unwrap();
    let refused = |name: &str| {
        let kernels = ampere["kernels"].as_array().unwrap();
        kernels.iter().find(|kernel| kernel["name"] == name).unwrap()["refused"].as_str().map(String::from)
    };
    assert_eq!(refused("vector_add"), None);
    assert!(refused("gemm-f16-nn").unwrap().contains("needs PTX 8.0 and sm_90"), "{ampere}");
}

#[test]
fn kernels_are_printed() {
    let folder = folder("kernel-ptx");
    let text = succeeds(&folder, &["kernel", "ptx", "vector_add"]);
    assert!(text.starts_with(".version ") && text.contains(".target sm_90a\n"), "{text}");
    assert_eq!(text, succeeds(&folder, &["kernel", "ptx", "vector_add"]));
    assert!(succeeds(&folder, &["kernel", "ptx", "vector_add", "--arch", "sm_80"]).contains(".target sm_80\n"));
}

#[test]
fn wrong_calls() {
    let folder = folder("kernel-usage");
    for (args, line) in [
        (&["kernel"][..], "no command given; allowed: list, ptx, assemble, sass; try `fulgurite kernel --help`"),
        (&["kernel", "frob"], "unrecognized subcommand 'frob'; try `fulgurite kernel --help`"),
        (
            &["kernel", "ptx"],
            "the following required arguments were not provided: <NAME>; try `fulgurite kernel ptx --help`",
        ),
        (
            &["kernel", "assemble"],
            "the following required arguments were not provided: <NAME>; try `fulgurite kernel assemble --help`",
        ),
        (
            &["kernel", "assemble", "vector_add", "--all"],
            "the argument '[NAME]' cannot be used with '--all'; try `fulgurite kernel assemble --help`",
        ),
        (
            &["kernel", "ptx", "vector_add", "--arch", "sm_70"],
            "invalid value 'sm_70' for '--arch <ARCH>': allowed: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a, sm_121a; try `fulgurite kernel ptx --help`",
        ),
        (
            &["kernel", "ptx", "vectoradd"],
            "`NAME` is vectoradd, there is no such kernel, near: vector_add; try `fulgurite kernel list`",
        ),
        (&["kernel", "assemble", "softmax"], "`NAME` is softmax, there is no such kernel; try `fulgurite kernel list`"),
        (
            &["kernel", "assemble", "vector_add", "--ptxas", "no/such/ptxas"],
            "`ptxas` is no/such/ptxas, and there is no such file; `pip install nvidia-cuda-nvcc==13.0.88` brings one",
        ),
    ] {
        refuses(&folder, args, line);
    }
    let done = crate::common::fulgurite(&folder, &["kernel", "ptx", "gemm-f16-nn", "--arch", "sm_80"]);
    assert_eq!((done.code, done.err.lines().count()), (2, 1), "{}", done.err);
}

#[test]
fn a_missing_assembler_says_where_to_get_it() {
    let looked = |variables: &[(&str, &str)]| {
        let done = with(&["kernel", "assemble", "vector_add"], variables);
        // The call is right; this machine lacks what it needs.
        assert_eq!((done.code, done.out.as_str()), (1, ""), "{}", done.err);
        done.err
    };
    let hint = "`pip install nvidia-cuda-nvcc==13.0.88` in a Python environment brings it, no GPU is needed";
    assert_eq!(looked(&[]), format!("error: `ptxas` was not found in PATH; {hint}\n"));
    assert_eq!(
        looked(&[("PATH", ""), ("VIRTUAL_ENV", "no-such-place")]),
        format!("error: `ptxas` was not found in PATH, no-such-place; {hint}\n")
    );
}

/// An assembler that accepts everything stands in where all kernels are named: tests of `fulgurite-kernels` assemble them.
#[cfg(unix)]
#[test]
fn every_kernel_is_assembled_or_refused() {
    let says = "ptxas info    : Function properties for any
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 7 registers, used 1 barriers";
    let fake = fake_ptxas("kernel-every", says);
    let done = with(&["kernel", "assemble", "--all", "--json", "--arch", "sm_80", "--ptxas", &fake], &[]);
    assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
    let results: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(results["ok"], true, "{results}");
    let kernels = results["kernels"].as_array().unwrap();
    assert_eq!(kernels[0]["name"], "vector_add");
    for kernel in kernels {
        assert!(kernel["refused"].is_string() || kernel["report"]["registers"] == 7, "{kernel}");
    }
    let refused = kernels.iter().filter(|kernel| kernel["refused"].is_string()).count();
    assert!(refused > 20 && kernels.len() - refused > 40, "{refused} of {}", kernels.len());
}

#[test]
fn a_kernel_assembles_cleanly() {
    let Some(ptxas) = ptxas() else { return };
    let table = with(&["kernel", "assemble", "gemm-bf16-nt", "--ptxas", &ptxas], &[]);
    assert_eq!(table.code, 0, "{}", table.err);
    assert!(table.out.contains("gemm-bf16-nt") && table.out.contains(" 168 ") && table.out.contains(" ok "));
}

#[test]
fn machine_code_names_rust_lines() {
    let Some(ptxas) = ptxas() else { return };
    let done = with(&["kernel", "sass", "vector_add"], &[("PTXAS", &ptxas)]);
    if done.err.starts_with("error: `nvdisasm` was not found") {
        println!("skipped: {}", done.err);
        return;
    }
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    assert!(done.out.contains("FADD") && done.out.contains("// crates/kernels/src/add.rs:"), "{}", done.out);
}

/// The path of a program that says what an assembler would say, whatever the kernel.
#[cfg(unix)]
fn fake_ptxas(name: &str, says: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let fake = folder(name).join("ptxas");
    let script = format!(
        "#!/bin/sh
if [ \"$1\" = --version ]; then echo 'release 0.0, V0.0.1'; exit 0; fi
for last; do :; done
: > \"$last\"
echo >&2 \"{says}
ptxas info    : Compile time = 1.5 ms\"
"
    );
    std::fs::write(&fake, script).unwrap();
    std::fs::set_permissions(&fake, std::fs::Permissions::from_mode(0o755)).unwrap();
    fake.to_str().unwrap().to_string()
}

#[cfg(unix)]
#[test]
fn a_faulty_kernel_is_code_1_and_names_what_is_wrong() {
    let says = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : Function properties for vector_add
    8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers";
    let fake = fake_ptxas("kernel-faulty", says);
    let args = ["kernel", "assemble", "vector_add", "--ptxas", &fake];
    let done = with(&args, &[]);
    assert_eq!(
        (done.code, done.err.as_str()),
        (1, "error: 1 of 1 kernels are faulty: vector_add; what is wrong is listed above\n"),
        "{}",
        done.out
    );
    let wrong: Vec<&str> = done.out.lines().filter(|line| line.starts_with("vector_add: ")).collect();
    assert_eq!(
        wrong,
        [
            "vector_add: 8 bytes of registers spilled and 4 read back; keep fewer values alive, or give the role more registers",
            "vector_add: C7508 Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.",
        ]
    );
    assert!(done.out.contains("FAULTY"), "{}", done.out);
}

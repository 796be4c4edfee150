//! Wrong calls and wrong files: one line, exit code 2, never a panic.

use crate::common::{folder, fulgurite, refuses, write};
use fulgurite::{DType, Tensor};
use std::fs;

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(DType::F32, shape).unwrap()
}

#[test]
fn wrong_usage() {
    let folder = folder("usage");
    for (args, line) in [
        (
            &[][..],
            "no command given; allowed: bench, check, run, cache, doctor, explain, tune, kernel, sim, sim-vs-gpu, cluster, neighbors, svd, completions, man; try `fulgurite --help`",
        ),
        (&["frob"], "unrecognized subcommand 'frob'; try `fulgurite --help`"),
        (
            &["explain", "--casual"],
            "unexpected argument '--casual' found; did you mean '--causal'?; try `fulgurite explain --help`",
        ),
        (&["bench", "--frob"], "unexpected argument '--frob' found; try `fulgurite bench --help`"),
        (
            &["run", "x"],
            "the following required arguments were not provided: --output <OUT>; try `fulgurite run --help`",
        ),
        (
            &["run", "x", "-o", "y", "--window", "3"],
            "invalid value '3' for '--window <L,R>': allowed: L,R in whole numbers, such as 128,0; an empty side is unbounded; try `fulgurite run --help`",
        ),
        (
            &["run", "x", "-o", "y", "--exp", "fast"],
            "invalid value 'fast' for '--exp <NAME>': `exp` is \"fast\", allowed: auto, native, poly:DEGREE, poly:DEGREE:SHARE, sas, sas:THRESHOLD, sas:online; try `fulgurite run --help`",
        ),
        (
            &["bench", "--dtypes", "f64"],
            "invalid value 'f64' for '--dtypes <T,..>': allowed: f32, f16, bf16; try `fulgurite bench --help`",
        ),
        (
            &["check", "--order", "random"],
            "invalid value 'random' for '--order <ORDER>': allowed: any, fixed; try `fulgurite check --help`",
        ),
        (&["bench", "--lens", "0"], "`--lens` has 0, allowed: 1 to 1048576"),
        (&["bench", "--repeats", "0"], "`--repeats` has 0, allowed: 1 to 1000"),
        (&["doctor", "--threads", "0"], "`threads` is 0, allowed: 1 to 4096; leave it out for one per core"),
    ] {
        refuses(&folder, args, line);
    }
    let done = fulgurite(&folder, &["run", "x", "-o", "y", "--tau", "8", "--rescale", "always"]);
    assert_eq!(done.code, 2);
    assert_eq!(done.err.lines().count(), 1, "{}", done.err);
    assert_eq!(fulgurite(&folder, &["--help"]).code, 0);
    assert_eq!(fulgurite(&folder, &["run", "--help"]).code, 0);
    assert_eq!(fulgurite(&folder, &["--version"]).out, concat!("fulgurite ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn wrong_files() {
    let folder = folder("files");
    let run = |name: &str, line: &str| refuses(&folder, &["run", name, "-o", "out.safetensors"], line);
    run("none.safetensors", "cannot read none.safetensors: no such file or folder; check the path");
    let whole = {
        write(&folder, "whole.safetensors", &[("q", &zeros(&[1, 2, 1, 4]))]);
        fs::read(folder.join("whole.safetensors")).unwrap()
    };
    run("whole.safetensors", "whole.safetensors has no tensor `k`, it has: q; q, k and v are needed");
    let cut = |name: &str, bytes: &[u8], why: &str| {
        fs::write(folder.join(name), bytes).unwrap();
        run(name, &format!("{name}: not a whole safetensors file ({why}); write it again, it may be cut off"));
    };
    cut("empty.safetensors", b"", "header too small");
    cut("huge.safetensors", &[0xff; 64], "header too large");
    cut("long.safetensors", &[&(1u64 << 20).to_le_bytes()[..], b"{}"].concat(), "invalid header length");
    let short = &whole[..whole.len() - 1];
    cut("short.safetensors", short, "incomplete metadata, file not fully covered");
    fs::create_dir(folder.join("nothing")).unwrap();
    run("nothing", "nothing has no .npy files; give q.npy, k.npy and v.npy");
    let npy = |bytes: &[u8], line: &str| {
        fs::create_dir_all(folder.join("npy")).unwrap();
        fs::write(folder.join("npy/q.npy"), bytes).unwrap();
        run("npy", &format!("npy/q.npy: {line}"));
    };
    npy(b"PK\x03\x04", "not an npy file; save it with numpy.save");
    npy(
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
        "not a whole npy file (its header is cut off or too long); save it again",
    );
    let header = |text: &str| [b"\x93NUMPY\x01\x00", &(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat();
    npy(
        &header("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"),
        "shape [2, 3] of <f4 does not fit 0 bytes of data; save it again, it may be cut off",
    );
    npy(&header(&"(".repeat(4000)), "the header has 4000 brackets, allowed: 16; save a plain array");
    let deep = "the header's brackets do not pair, or nest more than 4 deep; save a plain array";
    npy(&header(&"{".repeat(12)), deep);
    npy(&header("{'}'{'}'{'}'{'}'{"), deep);
    let done = fulgurite(&folder, &["run", "whole.safetensors", "-o", "out.bin"]);
    assert_eq!(
        done.err,
        "error: `--output` is out.bin, allowed: a name ending in .safetensors, or a folder for .npy files\n"
    );
}

#[test]
fn wrong_tensors() {
    let folder = folder("tensors");
    let x = zeros(&[1, 4, 2, 8]);
    let integers = Tensor::zeros(DType::I32, &[1, 4, 2, 8]).unwrap();
    let half = Tensor::zeros(DType::F16, &[1, 4, 2, 8]).unwrap();
    let cu = |values: &[i32]| Tensor::new(values.to_vec(), &[values.len()]).unwrap();
    let file = "in.safetensors";
    let run = |tensors: &[(&str, &Tensor)], flags: &[&str], line: &str| {
        write(&folder, file, tensors);
        refuses(&folder, &[&["run", file, "-o", "out.safetensors"], flags].concat(), line);
        assert!(!folder.join("out.safetensors").exists());
    };
    run(&[("q", &integers), ("k", &x), ("v", &x)], &[], "`q` is i32, allowed: f32, f16, bf16; convert it");
    run(&[("q", &x), ("k", &half), ("v", &x)], &[], "`k` is f16, allowed: f32; convert it or change the problem");
    run(
        &[("q", &x), ("k", &zeros(&[1, 4, 3, 8])), ("v", &x)],
        &[],
        "`heads`: 2 query heads over 3 key/value heads, allowed: at least 1 each, query heads a multiple of key/value heads; repeat or drop heads of q",
    );
    run(
        &[("q", &x), ("k", &x), ("v", &zeros(&[1, 5, 2, 8]))],
        &[],
        "`v` has shape [1, 5, 2, 8], allowed: [1, 4, 2, 8]; check the sizes given to the problem",
    );
    run(
        &[("q", &zeros(&[4, 2, 8])), ("k", &x), ("v", &x)],
        &[],
        "`q` has shape [4, 2, 8], allowed: [batch, sequence, heads, head_dim]; add the missing axes, or give cu_seqlens",
    );
    run(
        &[("q", &zeros(&[])), ("k", &x), ("v", &x)],
        &["--alibi"],
        "`q` has shape [], allowed: [batch, sequence, heads, head_dim]; add the missing axes, or give cu_seqlens",
    );
    let y = zeros(&[4, 2, 8]);
    run(
        &[("q", &y), ("k", &y), ("v", &y), ("cu_seqlens", &cu(&[0, 3, 2, 4]))],
        &[],
        "`cu_seqlens_q`[2] is 2 after 3, allowed: not smaller; offsets are cumulative",
    );
    run(
        &[("q", &y), ("k", &y), ("v", &y), ("cu_seqlens_q", &cu(&[0, 4]))],
        &[],
        "in.safetensors has `cu_seqlens_q` without `cu_seqlens_k`; give both or none",
    );
    run(
        &[("q", &y), ("k", &y), ("v", &y), ("cu_seqlens", &y)],
        &[],
        "`cu_seqlens` is f32, allowed: i32, i64; convert it",
    );
    let good = [("q", &x), ("k", &x), ("v", &x)];
    run(&good, &["--scale", "NaN"], "`scale` is NaN, allowed: finite and above 0; leave it out for 1/sqrt(head_dim)");
    run(&good, &["--softcap", "-1"], "`softcap` is -1, allowed: finite and above 0; leave it out for none");
    run(&good, &["--tau", "-1"], "`tau` is -1, allowed: 0 to 60; the usual value is 8, 0 rescales always");
    run(
        &good,
        &["--exp", "sas", "--tau", "8", "--engine", "cpu:portable"],
        "engine cpu:portable does not have exp sas:-10 with rescale lazy:8; leave rescale out, or use always; the engine `oracle` takes any",
    );
    run(
        &[&good[..], &[("d_lse", &zeros(&[1, 2, 4]))]].concat(),
        &[],
        "in.safetensors has `d_lse` without `d_o`; give zeros for `d_o`",
    );
    run(
        &[&good[..], &[("d_o", &zeros(&[1, 4, 2, 4]))]].concat(),
        &[],
        "`d_o` has shape [1, 4, 2, 4], allowed: [1, 4, 2, 8]; check the sizes given to the problem",
    );
    run(&[&good[..], &[("used_k", &cu(&[5]))]].concat(), &[], "`used_k`[0] is 5, allowed: 0 to 4");
    let vast = zeros(&[1 << 20, 0, 1 << 20, 1]);
    run(
        &[("q", &vast), ("k", &vast), ("v", &vast)],
        &[],
        "`q` has 1048576 sequences of 1048576 heads, allowed: 4194304 heads in all; split it",
    );
    run(
        &[("q", &vast), ("k", &vast), ("v", &vast)],
        &["--alibi"],
        "`q` has 1048576 heads, allowed with --alibi: 65536; give `alibi_slopes`",
    );
    let bf = Tensor::zeros(DType::Bf16, &[1, 4, 2, 8]).unwrap();
    write(&folder, file, &[("q", &bf), ("k", &bf), ("v", &bf)]);
    refuses(
        &folder,
        &["run", file, "-o", "npy"],
        "results are bf16, which .npy does not have; write to a name ending in .safetensors",
    );
}

#[test]
fn failures_of_the_work_are_code_1() {
    let folder = folder("work");
    let x = zeros(&[1, 4, 2, 8]);
    write(&folder, "in.safetensors", &[("q", &x), ("k", &x), ("v", &x)]);
    fs::write(folder.join("file"), b"").unwrap();
    let done = fulgurite(&folder, &["run", "in.safetensors", "-o", "file/out.safetensors"]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.starts_with("error: cannot write file/out.safetensors: "), "{}", done.err);
}

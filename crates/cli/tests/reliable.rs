//! Files and sizes that would end the process, outputs that are all there or as they were, names that are shown plainly.

use crate::common::{folder, fulgurite, succeeds, write};
use fulgurite::Tensor;
use std::path::Path;

/// Runs the command, which must refuse its input in one line; what it says.
fn refused(folder: &Path, args: &[&str]) -> String {
    let done = fulgurite(folder, args);
    assert!(done.code == 2 && done.err.lines().count() >= 1, "{args:?}: {} {}", done.code, done.err);
    done.err
}

/// A safetensors file of tensors without elements, which may claim any shape.
fn write_empty(path: &Path, tensors: &[(&str, &str, &[usize])]) {
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, dtype, shape)| {
            format!("{name:?}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[0,0]}}")
        })
        .collect();
    let mut header = format!("{{{}}}", entries.join(","));
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn sizes_are_refused_before_memory_is_asked_for() {
    let folder = folder("memory");
    let floats = |shape: &[usize]| Tensor::new(vec![0.5f32; shape.iter().product()], shape).unwrap();
    let q = floats(&[4, 1, 8]);
    let offsets = Tensor::new(vec![0i32, (1 << 30) - 1], &[2]).unwrap();
    write(&folder, "cu.safetensors", &[("q", &q), ("k", &q), ("v", &q), ("cu_seqlens", &offsets)]);
    let text = refused(&folder, &["run", "cu.safetensors", "-o", "o.safetensors"]);
    assert!(text.contains("`q` has shape [4, 1, 8], allowed: [1073741823, 1, 8]"), "{text}");
    let delta: [(&str, &str, &[usize]); 5] = [
        ("q", "F32", &[1 << 20, 0, 16, 256]),
        ("k", "F32", &[1 << 20, 0, 16, 256]),
        ("v", "F32", &[1 << 20, 0, 16, 256]),
        ("g", "F32", &[1 << 20, 0, 16]),
        ("beta", "F32", &[1 << 20, 0, 16]),
    ];
    write_empty(&folder.join("gd.safetensors"), &delta);
    let text = refused(&folder, &["run", "gd.safetensors", "-o", "o.safetensors", "--op", "gated-delta"]);
    assert!(text.contains("bytes"), "{text}");
    let cache: [(&str, &str, &[usize]); 2] = [("k", "F32", &[0, 1 << 40, 4]), ("v", "F32", &[0, 1 << 40, 4])];
    write_empty(&folder.join("c.safetensors"), &cache);
    refused(&folder, &["cache", "c.safetensors"]);
    let million = "1048576";
    refused(&folder, &["sim", "gemm-bf16-nn", "-m", million, "-n", million, "-k", million]);
    refused(&folder, &["sim", "row_softmax", "-m", million, "-n", million]);
    refused(&folder, &["sim", "attention-bf16-d64-full", "--heads", million]);
    let lengths = ["--q-len", million, "--k-len", million, "--heads", million, "--batch", million];
    refused(&folder, &[&["sim", "attention-bf16-d64-full"], &lengths[..]].concat());
}

#[test]
fn threads_are_bounded_everywhere() {
    let folder = folder("threads");
    let points = Tensor::new((0..60).map(|x| x as f32).collect::<Vec<f32>>(), &[20, 3]).unwrap();
    write(&folder, "p.safetensors", &[("points", &points)]);
    for threads in ["0", "4097", "9223372036854775808"] {
        refused(&folder, &["svd", "p.safetensors", "-k", "2", "--threads", threads]);
    }
    succeeds(&folder, &["svd", "p.safetensors", "-k", "2", "--threads", "3"]);
}

#[test]
fn a_wrong_gradient_or_output_is_refused_before_forward() {
    let folder = folder("early");
    let x = Tensor::new(vec![0.5f32; 4 * 8], &[1, 4, 1, 8]).unwrap();
    let wrong = Tensor::new(vec![0.5f32; 8], &[1, 1, 1, 8]).unwrap();
    write(&folder, "x.safetensors", &[("q", &x), ("k", &x), ("v", &x), ("d_o", &wrong)]);
    let text = refused(&folder, &["run", "x.safetensors", "-o", "o.safetensors"]);
    assert!(text.contains("`d_o` has shape [1, 1, 1, 8]"), "{text}");
    assert!(!folder.join("o.safetensors").exists());
}

#[test]
fn names_from_files_are_shown_plainly() {
    let folder = folder("names");
    let long = "n".repeat(1 << 20);
    let tensors: [(&str, &str, &[usize]); 2] = [("\u{1b}[31mq", "F32", &[0]), (&long, "F32", &[0])];
    write_empty(&folder.join("x.safetensors"), &tensors);
    let text = refused(&folder, &["run", "x.safetensors", "-o", "o.safetensors"]);
    assert!(!text.contains('\u{1b}') && text.len() < 2000, "{} bytes", text.len());
}

#[cfg(unix)]
#[test]
fn outputs_keep_their_mode_and_their_links() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = folder("modes");
    let x = Tensor::new(vec![0.5f32; 4 * 8], &[1, 4, 1, 8]).unwrap();
    write(&folder, "x.safetensors", &[("q", &x), ("k", &x), ("v", &x)]);
    let secret = folder.join("o.safetensors");
    std::fs::write(&secret, "before").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    // What a process that is gone left.
    let left = folder.join("o.safetensors.999999999.part");
    std::fs::write(&left, "left").unwrap();
    succeeds(&folder, &["run", "x.safetensors", "-o", "o.safetensors"]);
    assert_eq!(std::fs::metadata(&secret).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(!left.exists());
    let (link, aim) = (folder.join("link.safetensors"), folder.join("aim.safetensors"));
    symlink("aim.safetensors", &link).unwrap();
    succeeds(&folder, &["run", "x.safetensors", "-o", "link.safetensors"]);
    assert!(link.is_symlink() && aim.is_file());
}

//! `run` computes what the oracle says, whatever the file.

use crate::common::{folder, normal, read, succeeds, write};
use fulgurite::{Attention, DType, Forward, Gradients, Tensor, attention};
use fulgurite_core::compare;
use fulgurite_core::random::Rng;
use std::path::Path;

/// Judges the tensors in `out` as the result of `call`; `aux` are gradients in the order of the problem.
fn judge(
    folder: &Path,
    out: &str,
    call: &Attention<'_>,
    d_o: Option<&Tensor>,
    d_lse: Option<&Tensor>,
    sink: bool,
    aux: &[Option<&str>],
) {
    let (problem, inputs) = (call.problem().unwrap(), call.inputs().unwrap());
    let bound = inputs.bind(&problem).unwrap();
    let forward = Forward { o: read(folder, out, "o"), lse: read(folder, out, "lse") };
    let mut verdicts = compare::check_forward(&bound, &forward, 0);
    if let Some(d_o) = d_o {
        let gradients = Gradients {
            d_q: read(folder, out, "d_q"),
            d_k: read(folder, out, "d_k"),
            d_v: read(folder, out, "d_v"),
            d_sinks: sink.then(|| read(folder, out, "d_sink")),
            d_aux: aux.iter().map(|name| name.map(|name| read(folder, out, name))).collect(),
        };
        let mut saved = forward.saved(d_o.view());
        saved.d_lse = d_lse.map(Tensor::view);
        verdicts.extend(compare::check_backward(&bound, &saved, &gradients, 0));
    }
    for (name, verdict) in verdicts {
        assert!(verdict.ok(), "{out}: {name}: {verdict}");
    }
}

fn round_trips(engine: &str, folder: &Path) {
    let rng = &mut Rng::new(7);
    for dtype in DType::FLOATS {
        let (q, k, v) = (
            normal(rng, dtype, &[2, 9, 4, 16]),
            normal(rng, dtype, &[2, 13, 2, 16]),
            normal(rng, dtype, &[2, 13, 2, 8]),
        );
        let (d_o, d_lse) = (normal(rng, dtype, &[2, 9, 4, 8]), normal(rng, DType::F32, &[2, 4, 9]));

        write(folder, "plain.safetensors", &[("q", &q), ("k", &k), ("v", &v)]);
        succeeds(folder, &["run", "plain.safetensors", "-o", "out.safetensors", "--engine", engine]);
        judge(folder, "out.safetensors", &attention(&q, &k, &v), None, None, false, &[]);

        write(folder, "both.safetensors", &[("q", &q), ("k", &k), ("v", &v), ("d_o", &d_o), ("d_lse", &d_lse)]);
        let flags = ["--causal", "--window", "5,", "--scale", "0.5", "--softcap", "3", "--engine", engine];
        succeeds(folder, &[&["run", "both.safetensors", "-o", "out.safetensors"], &flags[..]].concat());
        let call = attention(&q, &k, &v).causal().window(5, None).scale(0.5).softcap(3.0);
        judge(folder, "out.safetensors", &call, Some(&d_o), Some(&d_lse), false, &[]);

        let sink = normal(rng, DType::F32, &[4]);
        let (bias, used) = (normal(rng, dtype, &[1, 4, 9, 13]), Tensor::new(vec![13, 4], &[2]).unwrap());
        let rest = [("sink", &sink), ("bias", &bias), ("used_k", &used), ("d_o", &d_o)];
        write(folder, "more.safetensors", &[&[("q", &q), ("k", &k), ("v", &v)], &rest[..]].concat());
        succeeds(folder, &["run", "more.safetensors", "-o", "out.safetensors", "--alibi", "--engine", engine]);
        let slopes = Tensor::new(vec![0.25f32, 0.0625, 0.015625, 0.00390625], &[4]).unwrap();
        let call = attention(&q, &k, &v).alibi(&slopes).bias_with_grad(&bias).sinks(&sink).used_k(&used);
        judge(folder, "out.safetensors", &call, Some(&d_o), None, true, &[None, Some("d_bias")]);

        let prefix = Tensor::new(vec![5, 0], &[2]).unwrap();
        let documents = |len: usize| Tensor::new((0..2 * len as i32).map(|i| i / 5).collect(), &[2, len]).unwrap();
        let (documents_q, documents_k) = (documents(9), documents(13));
        let masks = [("prefix_lengths", &prefix), ("documents_q", &documents_q), ("documents_k", &documents_k)];
        write(folder, "masks.safetensors", &[&[("q", &q), ("k", &k), ("v", &v)], &masks[..]].concat());
        succeeds(folder, &["run", "masks.safetensors", "-o", "out.safetensors", "--causal", "--engine", engine]);
        let call = attention(&q, &k, &v).prefix(&prefix).documents(&documents_q, &documents_k);
        judge(folder, "out.safetensors", &call, None, None, false, &[]);

        let (q, k) = (normal(rng, dtype, &[9, 2, 16]), normal(rng, dtype, &[11, 1, 16]));
        let (cu_q, cu_k) =
            (Tensor::new(vec![0, 4, 4, 9], &[4]).unwrap(), Tensor::new(vec![0, 5, 8, 11], &[4]).unwrap());
        let offsets = [("cu_seqlens_q", &cu_q), ("cu_seqlens_k", &cu_k)];
        write(folder, "packed.safetensors", &[&[("q", &q), ("k", &k), ("v", &k)], &offsets[..]].concat());
        succeeds(folder, &["run", "packed.safetensors", "-o", "out.safetensors", "--causal", "--engine", engine]);
        judge(
            folder,
            "out.safetensors",
            &attention(&q, &k, &k).cu_seqlens(&cu_q, &cu_k).causal(),
            None,
            None,
            false,
            &[],
        );

        write(folder, "same.safetensors", &[("q", &k), ("k", &k), ("v", &k), ("cu_seqlens", &cu_k)]);
        succeeds(folder, &["run", "same.safetensors", "-o", "out.safetensors", "--engine", engine]);
        judge(folder, "out.safetensors", &attention(&k, &k, &k).cu_seqlens(&cu_k, &cu_k), None, None, false, &[]);

        if dtype != DType::Bf16 {
            write(
                folder,
                &format!("npy_{dtype}"),
                &[("q", &q), ("k", &k), ("v", &k), ("cu_seqlens_q", &cu_q), ("cu_seqlens_k", &cu_k)],
            );
            succeeds(folder, &["run", &format!("npy_{dtype}"), "-o", "npy_out", "--engine", engine]);
            judge(folder, "npy_out", &attention(&q, &k, &k).cu_seqlens(&cu_q, &cu_k), None, None, false, &[]);
        }
    }
}

#[test]
fn the_oracle_engine_round_trips() {
    round_trips("oracle", &folder("run_oracle"));
}

#[test]
fn the_best_engine_round_trips() {
    round_trips("best", &folder("run_best"));
}

#[test]
fn exp_and_rescale_reach_the_engine() {
    let folder = folder("run_exp");
    let x = normal(&mut Rng::new(3), DType::F32, &[1, 4, 1, 8]);
    write(&folder, "in.safetensors", &[("q", &x), ("k", &x), ("v", &x)]);
    let run = ["run", "in.safetensors", "-o", "out.safetensors"];
    for flags in
        [&["--exp", "sas:-6", "--rescale", "always"][..], &["--tau", "8"], &["--exp", "poly:5", "--threads", "2"]]
    {
        succeeds(&folder, &[&run[..], flags].concat());
    }
    let call = attention(&x, &x, &x).exp("sas:-6".parse().unwrap());
    succeeds(&folder, &[&run[..], &["--exp", "sas:-6", "--engine", "oracle"]].concat());
    judge(&folder, "out.safetensors", &call, None, None, false, &[]);
    let shown = succeeds(&folder, &[&run[..], &["--tau", "8"]].concat());
    assert!(shown.contains("rescale lazy:8"), "{shown}");
}

#[test]
fn the_summary_is_json() {
    let folder = folder("run_json");
    let x = normal(&mut Rng::new(3), DType::Bf16, &[1, 4, 1, 8]);
    write(&folder, "in.safetensors", &[("q", &x), ("k", &x), ("v", &x), ("d_o", &x), ("weight", &x)]);
    let args = ["run", "in.safetensors", "-o", "deep/out.safetensors", "--json", "--engine", "oracle"];
    let summary: serde_json::Value = serde_json::from_str(&succeeds(&folder, &args)).unwrap();
    assert_eq!(summary["ignored"], serde_json::json!(["weight"]));
    assert_eq!(summary["output"][0], serde_json::json!({"name": "o", "dtype": "bf16", "shape": [1, 4, 1, 8]}));
    assert_eq!(summary["output"][1], serde_json::json!({"name": "lse", "dtype": "f32", "shape": [1, 1, 4]}));
    assert_eq!(summary["output"].as_array().unwrap().len(), 5);
    assert!(summary["backward_seconds"].as_f64().unwrap() >= 0.0);
    let shown = succeeds(&folder, &["run", "in.safetensors", "-o", "out.safetensors"]);
    assert!(shown.starts_with("not read: weight; `fulgurite run --help` lists what is\n"), "{shown}");
}

#[test]
fn empty_tensors_give_empty_results() {
    let folder = folder("run_empty");
    let (q, k) = (Tensor::zeros(DType::F32, &[1, 0, 2, 8]).unwrap(), Tensor::zeros(DType::F32, &[1, 3, 1, 8]).unwrap());
    write(&folder, "in.safetensors", &[("q", &q), ("k", &k), ("v", &k), ("d_o", &q)]);
    succeeds(&folder, &["run", "in.safetensors", "-o", "out.safetensors", "--causal", "--engine", "oracle"]);
    assert_eq!(read(&folder, "out.safetensors", "o").shape()[..], [1, 0, 2, 8]);
    assert_eq!(read(&folder, "out.safetensors", "d_k"), k);
}

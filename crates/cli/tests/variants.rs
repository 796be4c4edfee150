//! `run --op`, `run --skip` and `explain --skip`: what the oracles say, and what is refused.

use crate::common::{folder, normal, read, refuses, succeeds, write};
use fulgurite::{DType, Tensor, attention};
use fulgurite_core::cases::variants::{DeltaCase, DeltaSizes, LighthouseCase};
use fulgurite_core::compare::Verdict;
use fulgurite_core::gated_delta::{DeltaForward, DeltaGradients, QkNorm, check_backward, check_forward};
use fulgurite_core::parallax::{Parallax, ParallaxForward, ParallaxGradients};
use fulgurite_core::random::Rng;
use fulgurite_core::{lighthouse, parallax};
use serde_json::Value;

fn right(verdicts: Vec<(String, Verdict)>) {
    for (name, verdict) in verdicts {
        assert!(verdict.ok(), "{name}: {verdict}");
    }
}

#[test]
fn parallax_is_its_oracle() {
    let (folder, rng) = (folder("around-parallax"), &mut Rng::new(1));
    let (q, k) = (normal(rng, DType::F32, &[1, 20, 4, 8]), normal(rng, DType::F32, &[1, 30, 2, 8]));
    let (r, d_o) = (normal(rng, DType::F32, &[1, 20, 4, 8]), normal(rng, DType::F32, &[1, 20, 4, 8]));
    write(&folder, "in.safetensors", &[("q", &q), ("k", &k), ("v", &k), ("r", &r), ("d_o", &d_o)]);
    succeeds(&folder, &["run", "in.safetensors", "-o", "out.safetensors", "--op", "parallax", "--causal"]);
    let call = attention(&q, &k, &k).causal();
    let (problem, inputs) = (Parallax::new(call.problem().unwrap()).unwrap(), call.inputs().unwrap());
    let bound = problem.bind(&inputs, r.view()).unwrap();
    let get = |name: &str| read(&folder, "out.safetensors", name);
    let own = fulgurite::Forward { o: get("o"), lse: get("lse") };
    let mean = Tensor::zeros(DType::F32, own.lse.shape()).unwrap();
    let gradients = ParallaxGradients { d_q: get("d_q"), d_r: get("d_r"), d_k: get("d_k"), d_v: get("d_v") };
    right(parallax::check(&bound, &ParallaxForward { own, mean }, Some((&d_o.view(), &gradients))));
}

#[test]
fn lighthouse_is_its_oracle() {
    let folder = folder("around-lighthouse");
    let LighthouseCase { light, q, k, v, d_o } = LighthouseCase::random(5, DType::F32);
    let ([_, len, ..], args) = (light.sizes(), ["--op", "lighthouse", "--levels", "2", "--pool", "2", "--tile", "2"]);
    let same = lighthouse::Lighthouse::new(light.sizes(), light.dims(), 2, 2, 2, 2).unwrap();
    assert!(len.is_multiple_of(4));
    write(&folder, "in.safetensors", &[("q", &q), ("k", &k), ("v", &v), ("d_o", &d_o)]);
    let run = ["run", "in.safetensors", "-o", "out.safetensors", "--budget", "2", "--json"];
    let done: Value = serde_json::from_str(&succeeds(&folder, &[&run[..], &args].concat())).unwrap();
    assert_eq!(done["facts"][0][1], same.picked() as f64);
    let get = |name: &str| read(&folder, "out.safetensors", name);
    let found = fulgurite::variants::lighthouse(&q, &k, &v).levels(2).pool(2).budget(2).tile(2).forward().unwrap();
    let (o, d_q, d_k, d_v) = (get("o"), get("d_q"), get("d_k"), get("d_v"));
    right(lighthouse::check(&same, &found.entries, [&q, &k, &v], &o, Some((&d_o, [&d_q, &d_k, &d_v]))));
}

#[test]
fn gated_delta_is_its_oracle() {
    let folder = folder("around-delta");
    for packed in [false, true] {
        let sizes = DeltaSizes {
            lengths: if packed { vec![70, 0, 33] } else { vec![90] },
            packed,
            heads: [2, 4],
            dims: [16, 8],
            decay: 1.0,
            norm: QkNorm::Inside,
            initial: true,
        };
        let case = DeltaCase::new(&mut Rng::new(2), DType::F32, &sizes);
        let names = ["q", "k", "v", "g", "beta", "initial_state", "d_o", "d_final_state"];
        let mut all: Vec<(&str, &Tensor)> = names.into_iter().zip(&case.tensors).collect();
        all.extend(case.offsets.as_ref().map(|offsets| ("cu_seqlens", offsets)));
        write(&folder, "in.safetensors", &all);
        let run = ["run", "in.safetensors", "-o", "out.safetensors", "--op", "gated-delta", "--l2norm"];
        let (inputs, get) = (case.inputs(), |name: &str| read(&folder, "out.safetensors", name));
        let bound = inputs.bind(&case.problem).unwrap();
        for form in ["chunked", "recurrent"] {
            succeeds(&folder, &[&run[..], &["--form", form]].concat());
            right(check_forward(&bound, &DeltaForward { o: get("o"), final_state: get("final_state") }, 0));
            let gradients = DeltaGradients {
                d_q: get("d_q"),
                d_k: get("d_k"),
                d_v: get("d_v"),
                d_g: get("d_g"),
                d_beta: get("d_beta"),
                d_initial_state: get("d_initial_state"),
            };
            right(check_backward(&bound, &case.saved(), &gradients, 0));
        }
    }
}

#[test]
fn skipping_is_attention_with_a_window() {
    let (folder, rng) = (folder("around-skip"), &mut Rng::new(4));
    let (q, k) = (normal(rng, DType::F32, &[1, 200, 2, 8]), normal(rng, DType::F32, &[1, 200, 1, 8]));
    let d_o = normal(rng, DType::F32, &[1, 200, 2, 8]);
    write(&folder, "in.safetensors", &[("q", &q), ("k", &k), ("v", &k), ("d_o", &d_o)]);
    let run =
        ["run", "in.safetensors", "-o", "out.safetensors", "--causal", "--skip", "window:20:0,tile:16x16", "--json"];
    let done: Value = serde_json::from_str(&succeeds(&folder, &run)).unwrap();
    let fact = |i: usize| done["facts"][i][1].as_f64().unwrap();
    // 13 rows of tiles see 1 to 13 tiles in each of two heads; a window of 20 keys reaches two tiles back at most.
    assert_eq!([fact(0), fact(1), fact(3)], [2.0 * 91.0, 2.0 * (1.0 + 2.0 + 11.0 * 3.0), fact(2)]);
    let want = attention(&q, &k, &k).window(19, 0);
    let forward = want.forward().unwrap();
    let gradients = want.backward(&forward.saved(d_o.view())).unwrap();
    for (name, want) in [("o", &forward.o), ("lse", &forward.lse), ("d_q", &gradients.d_q), ("d_v", &gradients.d_v)] {
        let got = read(&folder, "out.safetensors", name);
        let pairs = got.view().to_f64().into_iter().zip(want.view().to_f64());
        assert!(pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max) <= 1e-5, "{name}");
    }
}

#[test]
fn explain_counts_and_draws_tiles() {
    let folder = folder("around-explain");
    let sizes = ["--q-len", "256", "--heads", "2", "--head-dim", "16", "--dtype", "f32", "--causal"];
    let skip = ["--skip", "window:32:0,log,top:0.5,lambda:1e-4,tile:16x16", "--picture", "kept.svg"];
    let text = succeeds(&folder, &[&["explain", "--json"], &sizes[..], &skip].concat());
    let found: Value = serde_json::from_str(&text).unwrap();
    let count = |name: &str| found["all"][name].as_u64().unwrap();
    assert_eq!(count("visible"), 2 * 16 * 17 / 2);
    assert!(count("left_by_class") < count("visible") && count("left_by_proxy") < count("left_by_class"));
    assert!(count("kept") <= count("left_by_proxy") && count("kept") >= 32, "{found}");
    let svg = std::fs::read_to_string(folder.join("kept.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("head 1, log") && svg.ends_with("</svg>\n"));
    // Tensors of a file: nothing is left out, and nothing is wrong.
    let x = normal(&mut Rng::new(1), DType::F32, &[1, 40, 1, 8]);
    write(&folder, "in.safetensors", &[("q", &x), ("k", &x), ("v", &x)]);
    let shown = succeeds(&folder, &["explain", "--skip", "dense", "--tensors", "in.safetensors"]);
    assert!(shown.contains("100.0 %") && shown.contains("kept of visible"), "{shown}");
}

#[test]
fn wrong_calls_are_refused() {
    let (folder, rng) = (folder("around-wrong"), &mut Rng::new(4));
    let (x, g) = (normal(rng, DType::F32, &[1, 12, 1, 8]), Tensor::new(vec![f32::NAN; 12], &[1, 12, 1]).unwrap());
    write(&folder, "in.safetensors", &[("q", &x), ("k", &x), ("v", &x), ("g", &g), ("beta", &g)]);
    let run = |rest: &[&str], line: &str| {
        refuses(&folder, &[&["run", "in.safetensors", "-o", "out.safetensors"], rest].concat(), line);
    };
    run(&["--op", "parallax"], "in.safetensors has no tensor `r`, it has: beta, g, k, q, v; q, r, k and v are needed");
    run(&["--op", "lighthouse", "--causal"], "`--causal` does not go with --op lighthouse; leave it out");
    run(
        &["--op", "gated-delta", "--skip", "log"],
        "`--skip` belongs to --op attention, this is --op gated-delta; leave it out",
    );
    run(&["--levels", "2"], "`--levels` belongs to --op lighthouse, this is --op attention; leave it out");
    run(&["--skip", "log", "--tau", "8"], "`--tau` does not go with --skip; leave one of them out");
    run(&["--op", "lighthouse"], "`len` is 12, allowed: a multiple of 64 (pool^levels); pad the sequence");
    run(
        &["--op", "gated-delta"],
        "`g` holds NaN at element 0, allowed: finite and at most 0; g is a log decay: pass -exp(A_log) * softplus(..), and large negative numbers for -inf",
    );
    run(&["--skip", "tile:64x48"], "`tile keys` is 48, allowed: 16, 32, 64 or 128; 64 is usual");
    run(
        &["--op", "rwkv"],
        "invalid value 'rwkv' for '--op <NAME>': allowed: attention, parallax, lighthouse, gated-delta; try `fulgurite run --help`",
    );
    run(&["--skip", "dense", "--engine", "oracle"], "engine oracle does not have block skipping; use the engine cpu");
}

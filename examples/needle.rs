//! A needle in a haystack: does attention still find it when tiles are skipped, and what does that cost in error?
//!
//! The haystack is made of topics: runs of tokens whose keys point one way, and whose queries ask for that way. A few rows
//! at the end ask for one key far back in a topic of others, whose value is a mark. Each way of skipping is run with the
//! needle at several depths: the share of tiles it keeps, the largest error against attention without skipping, and
//! whether the mark came through.
//!
//!     cargo run --release -p fulgurite --example needle                  # a table, some seconds
//!     cargo run --release -p fulgurite --example needle -- needle.svg    # and a picture: error over kept share
//!     cargo run --release -p fulgurite --example needle -- --quick       # a short haystack, for the tests

#[path = "plot.rs"]
mod plot;

use fulgurite::variants::Skip;
use fulgurite::{Tensor, attention};
use plot::{Plot, Series};
use std::error::Error;

const HEAD_DIM: usize = 64;
/// Rows at the end that ask for the needle.
const ASKING: usize = 16;
/// Tokens of a topic.
const TOPIC: usize = 100;
/// Lengths of queries that ask for their topic, and for the needle, when a key's is 1: own scores of 12 and 20.
const OWN: f32 = 1.5;
const STRENGTH: f32 = 2.5;

/// Ways of skipping, from safe to bold within each family.
const WAYS: [(&str, &[&str]); 5] = [
    ("lambda", &["lambda:1e-6", "lambda:1e-4", "lambda:1e-3", "lambda:1e-2", "lambda:0.1"]),
    ("mass", &["mass:0.98:-0.5", "mass:0.9:-0.5", "mass:0.7:-0.5", "mass:0.5:-0.5"]),
    ("top share", &["top:0.75:-1", "top:0.5:-1", "top:0.25:-1", "top:0.1:-1"]),
    ("log", &["log"]),
    ("window, sinks", &["window:1024:16", "window:512:16", "window:128:16"]),
];

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (tokens, file) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => (4096, None),
        ["--quick"] => (1024, None),
        [file] if !file.starts_with('-') => (4096, Some(file)),
        _ => return Err("usage: needle [--quick | FILE.svg]".into()),
    };
    println!("{tokens} tokens, {ASKING} of them ask for the needle; tiles of 64 rows and 64 keys\n");
    println!("{:<34} {:>6} {:>10} {:>10}  found at depth", "skip", "kept", "error", "bound");
    let mut series = Vec::new();
    for (family, ways) in WAYS {
        let mut points = Vec::new();
        for way in ways {
            let found = try_it(way, tokens)?;
            println!(
                "{way:<34} {:>5.1}% {:>10.1e} {:>10.1e}  {}",
                found.kept * 100.0,
                found.error,
                found.bound,
                found.words()
            );
            // What lambda drops is bounded; means of tiles and classes promise nothing.
            assert!(family != "lambda" || found.error <= found.bound + 1e-5, "{way}: the bound does not hold");
            assert!(family != "lambda" || found.at.iter().all(|&(_, there)| there), "{way}: lambda lost the needle");
            assert!(!way.starts_with("window:128") || found.at.iter().any(|&(_, there)| !there), "a window sees all?");
            points.push((found.kept, found.error));
        }
        series.push(Series { name: family.into(), points, dots: true });
    }
    if let Some(file) = file {
        let plot = Plot {
            title: format!("A needle among {tokens} keys: what is kept against the error"),
            x: "share of visible tiles that is kept".into(),
            y: "largest error of o".into(),
            powers: true,
            series,
        };
        std::fs::write(file, plot.svg())?;
        println!("\npicture: {file}");
    }
    Ok(())
}

/// What one way of skipping did, over all depths.
struct Found {
    kept: f64,
    error: f64,
    bound: f64,
    /// Depth in percent, and whether the mark came through there.
    at: Vec<(usize, bool)>,
}

impl Found {
    fn words(&self) -> String {
        let one = |&(depth, there): &(usize, bool)| format!("{depth}%:{}", if there { "yes" } else { "NO" });
        self.at.iter().map(one).collect::<Vec<_>>().join(" ")
    }
}

fn try_it(way: &str, tokens: usize) -> Result<Found, Box<dyn Error>> {
    let skip: Skip = format!("{way},tile:64x64").parse()?;
    let mut all = Found { kept: 0.0, error: 0.0, bound: 0.0, at: Vec::new() };
    let depths = [5, 35, 65, 95];
    for depth in depths {
        let needle = tokens * depth / 100;
        let mut random = Random(depth as u64);
        let mut way = |n: usize| (0..n).map(|_| if random.unit() < 0.5 { -1.0 } else { 1.0 }).collect::<Vec<f32>>();
        let (topics, direction) = (way(tokens.div_ceil(TOPIC) * HEAD_DIM), way(HEAD_DIM));
        let mut normal = |by: f32| (0..tokens * HEAD_DIM).map(|_| by * random.normal()).collect::<Vec<f32>>();
        let (mut q, mut k, mut v) = (normal(0.3), normal(0.3), normal(1.0));
        for t in 0..tokens {
            for c in 0..HEAD_DIM {
                let topic = topics[t / TOPIC * HEAD_DIM + c];
                q[t * HEAD_DIM + c] += if t < tokens - ASKING { OWN * topic } else { STRENGTH * direction[c] };
                k[t * HEAD_DIM + c] += topic;
            }
        }
        k[needle * HEAD_DIM..][..HEAD_DIM].copy_from_slice(&direction);
        v[needle * HEAD_DIM..][..HEAD_DIM].fill(1.0);
        let shape = [1, tokens, 1, HEAD_DIM];
        let (q, k, v) = (Tensor::new(q, &shape)?, Tensor::new(k, &shape)?, Tensor::new(v, &shape)?);
        let call = attention(&q, &k, &v).causal();
        let (dense, skipped) = (call.forward()?, call.skip(&skip)?);
        let counts = skipped.outcome.counts;
        all.kept += counts.kept as f64 / counts.visible as f64 / depths.len() as f64;
        all.bound = all.bound.max(skipped.outcome.error_bound);
        let (dense, got) = (values(&dense.o), values(&skipped.forward.o));
        let error = dense.iter().zip(got).map(|(x, y)| f64::from((x - y).abs())).fold(0.0, f64::max);
        all.error = all.error.max(error);
        // The mark is a row of ones; the haystack's values have mean 0.
        let last = &got[(tokens - 1) * HEAD_DIM..];
        all.at.push((depth, last.iter().sum::<f32>() / HEAD_DIM as f32 > 0.5));
        let without = &dense[(tokens - 1) * HEAD_DIM..];
        assert!(without.iter().sum::<f32>() / HEAD_DIM as f32 > 0.5, "attention itself must find the needle");
    }
    Ok(all)
}

fn values(tensor: &Tensor) -> &[f32] {
    tensor.as_slice().expect("the tensors are f32")
}

/// SplitMix64: small, seeded, the same everywhere.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / (1 << 24) as f32
    }
    /// Mean 0, variance 1: twelve uniform numbers are close enough.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

//! Block skipping with clusters of keys: causal attention over a text that changes its topic again and again, with no regard for
//! tiles. A tile in which topics meet has a mean that is near none of them; with k-means,
//! one mean for each cluster stands for its keys. Prints the share of tiles that was kept, and what it cost.

use fulgurite::neighbors::{KMeans, Points};
use fulgurite::{Mask, Problem, Tensor};
use fulgurite_core::random::Rng;
use fulgurite_core::skip::{Proxy, Skip, SkipProblem};
use fulgurite_core::{Forward, Inputs};
use fulgurite_cpu::{Options, skip_forward};

const LENGTH: usize = 2048;
const DIM: usize = 64;
const TOPICS: usize = 12;
/// Clusters of keys: more than topics, because nobody knows how many there are.
const CLUSTERS: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut rng = Rng::new(11);
    let topics: Vec<Vec<f64>> = (0..TOPICS).map(|_| rng.normals(DIM, 2.0)).collect();
    // Stretches of 20 to 140 tokens about one topic; queries and keys of a token share it.
    let mut about = Vec::new();
    while about.len() < LENGTH {
        let topic = rng.range(0..TOPICS);
        about.extend(std::iter::repeat_n(topic, rng.range(20..140)));
    }
    let mut tokens = |sigma: f64| -> Vec<f32> {
        let row = |i: usize| {
            let own = rng.normals(DIM, sigma);
            topics[about[i]].iter().zip(own).map(|(t, x)| (t + x) as f32).collect::<Vec<_>>()
        };
        (0..LENGTH).flat_map(row).collect()
    };
    let (q, k, v) = (tokens(1.0), tokens(1.0), tokens(1.0));
    let labels = KMeans::new(CLUSTERS).seed(1).max_steps(10).fit(Points::new(&k, [LENGTH, DIM])?)?;
    let tensor = |data: Vec<f32>| Tensor::new(data, &[1, LENGTH, 1, DIM]);
    let (q, k, v) = (tensor(q)?, tensor(k)?, tensor(v)?);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let builder = || Problem::builder().dense(1, LENGTH, LENGTH).heads(1, 1).head_dim(DIM).mask(Mask::causal());
    // The kept share of visible tiles, and o.
    let run = |proxy: Option<Proxy>, clusters: bool| -> Result<(f64, Vec<f32>), Box<dyn std::error::Error>> {
        let skip = Skip { proxy, tile: [64, 64], ..Skip::default() };
        let problem = SkipProblem::new(builder(), skip)?;
        let mut bound = problem.bind(&inputs)?;
        if clusters {
            bound = bound.with_clusters(labels.labels())?;
        }
        let mut out = Forward::zeros(problem.base())?;
        let counts = skip_forward(&bound, &mut out.outputs(), &Options::default()).counts;
        Ok((counts.kept as f64 / counts.visible as f64, out.o.as_slice::<f32>().unwrap_or_default().to_vec()))
    };
    let (_, full) = run(None, false)?;
    let error = |some: &[f32]| {
        let square = |x: f32| f64::from(x).powi(2);
        let off: f64 = some.iter().zip(&full).map(|(a, b)| square(a - b)).sum();
        (off / full.iter().map(|&x| square(x)).sum::<f64>()).sqrt()
    };
    println!("proxy of the keys                   kept   relative error");
    let show = |name: &str, proxy: Proxy, clusters: bool| -> Result<(f64, f64), Box<dyn std::error::Error>> {
        let (kept, some) = run(Some(proxy), clusters)?;
        let error = error(&some);
        println!("{name:34} {:4.1}%  {error:15.1e}", 100.0 * kept);
        Ok((kept, error))
    };
    let mut last = (1.0, 1.0);
    for mass in [0.9, 0.97, 0.99] {
        let means = show(&format!("means of tiles, mass {mass}"), Proxy::Mass { mass, similarity: -1.0 }, false)?;
        let wary = show(&format!("  unless keys differ, mass {mass}"), Proxy::Mass { mass, similarity: 0.6 }, false)?;
        let found = show(&format!("clusters, mass {mass}"), Proxy::Mass { mass, similarity: -1.0 }, true)?;
        if mass == 0.97 && !(found.0 < 0.5 * wary.0 && found.1 < 0.2 * means.1) {
            return Err(format!("kept {} of {}, error {} for {}", found.0, wary.0, found.1, means.1).into());
        }
        if found.1 > last.1 || found.0 > 0.5 {
            return Err(format!("a larger mass: error {} after {}", found.1, last.1).into());
        }
        last = found;
    }
    Ok(())
}

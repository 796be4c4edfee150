//! Attention in ten lines: bring tensors, say which keys may be seen, take the result.

use fulgurite::{Error, Forward, Tensor, attention};

fn main() -> Result<(), Error> {
    // [batch, sequence, heads, head_dim]; two key/value heads serve eight query heads.
    let wave = |n: usize| (0..n).map(|i| (0.37 * i as f32).sin()).collect::<Vec<f32>>();
    let q = Tensor::new(wave(128 * 8 * 64), &[1, 128, 8, 64])?;
    let k = Tensor::new(wave(128 * 2 * 64), &[1, 128, 2, 64])?;
    let v = Tensor::new(wave(128 * 2 * 64), &[1, 128, 2, 64])?;
    let Forward { o, lse } = attention(&q, &k, &v).causal().forward()?;
    println!("o {:?}, lse {:?}, o[0, 9, 0, 0] = {:.4}", o.shape(), lse.shape(), o.view().get(&[0, 9, 0, 0]));
    Ok(())
}

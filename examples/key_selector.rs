//! Attention that skips most of its blocks: keys and queries are sorted by k-means clusters, and each block of queries sees the
//! blocks of keys whose means promise most of its weight. Prints the share of blocks that was kept, and what it cost.

use fulgurite::neighbors::{KeySelector, Points};
use fulgurite::{BlockMask, Tensor, attention};
use fulgurite_core::random::Rng;

const LENGTH: usize = 2048;
const DIM: usize = 64;
/// Topics that tokens are about, in no order.
const TOPICS: usize = 24;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut rng = Rng::new(7);
    let topics: Vec<Vec<f64>> = (0..TOPICS).map(|_| rng.normals(DIM, 2.2)).collect();
    // A token is its topic and something of its own; which topic is drawn, so neighbours are strangers.
    let mut tokens = || -> Vec<f32> {
        let topic = |rng: &mut Rng| rng.range(0..TOPICS);
        let row = |_| {
            let about = topic(&mut rng);
            let own = rng.normals(DIM, 1.0);
            topics[about].iter().zip(own).map(|(t, x)| (t + x) as f32).collect::<Vec<_>>()
        };
        (0..LENGTH).flat_map(row).collect()
    };
    let (q, k, v) = (tokens(), tokens(), tokens());
    let shape = [1, LENGTH, 1, DIM];
    let tensor = |data: &[f32]| Tensor::new(data.to_vec(), &shape);
    let full = attention(&tensor(&q)?, &tensor(&k)?, &tensor(&v)?).forward()?;
    let full = full.o.as_slice::<f32>().unwrap_or_default();

    println!("weight   kept   relative error   the same number of blocks at random");
    let scale = 1.0 / (DIM as f64).sqrt();
    for weight in [0.8, 0.95, 0.99, 0.999] {
        let (rows, keys) = (Points::new(&q, [LENGTH, DIM])?, Points::new(&k, [LENGTH, DIM])?);
        let found = KeySelector::new(weight).select(rows, keys, scale)?;
        let sorted = |data: &[f32], order: &[u32]| {
            let rows = order.iter().flat_map(|&i| &data[i as usize * DIM..(i as usize + 1) * DIM]);
            Tensor::new(rows.copied().collect::<Vec<f32>>(), &shape)
        };
        let (q, k, v) = (sorted(&q, &found.query_order)?, sorted(&k, &found.key_order)?, sorted(&v, &found.key_order)?);
        let error = |blocks: &BlockMask| -> Result<f64, fulgurite::Error> {
            let some = attention(&q, &k, &v).block_mask(blocks).forward()?;
            let some = some.o.as_slice::<f32>().unwrap_or_default();
            // Row i of the result is query `query_order[i]`.
            let (mut square, mut size) = (0.0, 0.0);
            for (row, &query) in some.chunks_exact(DIM).zip(&found.query_order) {
                for (a, b) in row.iter().zip(&full[query as usize * DIM..]) {
                    square += f64::from(a - b).powi(2);
                    size += f64::from(*b).powi(2);
                }
            }
            Ok((square / size).sqrt())
        };
        let [q_blocks, k_blocks] = found.blocks.blocks();
        let each = ((found.kept * k_blocks as f64).round() as usize).max(1);
        let mut draw = || {
            let mut list: Vec<i32> = (0..k_blocks as i32).collect();
            (0..each).for_each(|i| list.swap(i, rng.range(i..k_blocks)));
            list.truncate(each);
            list.sort_unstable();
            list
        };
        let lists: Vec<Vec<i32>> = (0..q_blocks).map(|_| draw()).collect();
        let random = BlockMask::new(found.blocks.spec(), [q_blocks, k_blocks], vec![Vec::new(); q_blocks], lists)?;
        let (kept, chosen, by_chance) = (found.kept, error(&found.blocks)?, error(&random)?);
        println!("{weight:6}  {:4.1}%  {chosen:15.1e}  {by_chance:15.1e}", 100.0 * kept);
        if weight == 0.99 && !(kept < 0.25 && chosen < by_chance / 5.0) {
            return Err(format!("kept {kept}, error {chosen}, by chance {by_chance}").into());
        }
    }
    Ok(())
}

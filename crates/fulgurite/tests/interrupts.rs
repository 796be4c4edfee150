//! Calls that end because their caller wants it.

use fulgurite::{Choice, Forward, Inputs, Problem, Run, Tensor, engine};
use fulgurite_core::DType;
use fulgurite_core::random::Rng;
use fulgurite_core::stop::{Stopped, catch};
use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    /// When this thread's caller begins to want an end.
    static WISH: Cell<Option<Instant>> = const { Cell::new(None) };
}

fn is_wished() -> bool {
    WISH.get().is_some_and(|wish| Instant::now() >= wish)
}

fn random(shape: [usize; 4]) -> Tensor {
    Tensor::from_f64(DType::Bf16, &Rng::new(1).normals(shape.iter().product(), 1.0), &shape).unwrap()
}

/// Forward and backward of a problem that takes the simulator minutes, and a small one on the same engine afterwards.
#[test]
fn the_simulator_ends_within_a_second() {
    let sim = engine(Choice::Sim).unwrap();
    let build =
        |len| Problem::builder().dense(1, len, len).heads(2, 2).head_dim(64).dtype(DType::Bf16).build().unwrap();
    let (long, short) = (build(4096), build(40));
    let (x, y) = (random([1, 4096, 2, 64]), random([1, 40, 2, 64]));
    let inputs = Inputs::new(x.view(), x.view(), x.view());
    let zeros = Forward::zeros(&long).unwrap();
    let calls: [&dyn Fn(); 2] = [&|| drop(sim.forward(&long, &inputs, &Run::default())), &|| {
        drop(sim.backward(&long, &inputs, &zeros.saved(x.view()), &Run::default()))
    }];
    for call in calls {
        let wish = Instant::now() + Duration::from_millis(700);
        WISH.set(Some(wish));
        assert_eq!(catch(Some(is_wished), call), Err(Stopped::Asked));
        assert!(wish.elapsed() < Duration::from_secs(1), "{:?}", wish.elapsed());
    }
    let small = Inputs::new(y.view(), y.view(), y.view());
    let [got, want] = [&sim, &engine(Choice::Sim).unwrap()]
        .map(|sim| sim.forward(&short, &small, &Run::default()).unwrap().o.view().to_f64());
    assert_eq!(got, want);
}

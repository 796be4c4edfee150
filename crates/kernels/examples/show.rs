//! scratch
use fulgurite_core::{Exp, Mask, Rescale};
use fulgurite_kernels::attention::forward::{self, Features, Tuning};
use fulgurite_kernels::*;
use fulgurite_ptx::{Major, Target, bf16, f16};
fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let n = |i: usize| args[i].parse::<u32>().unwrap();
    let major = |c: char| if c == 'i' { Major::Inner } else { Major::Outer };
    let k = match args[0].as_str() {
        "gemm" => {
            let l =
                gemm::Layouts { a: major(args[2].chars().next().unwrap()), b: major(args[2].chars().nth(1).unwrap()) };
            let t = gemm::Tuning { rows: n(3), cols: n(4), depth: n(5), cluster: n(6), band: n(7) };
            if args[1] == "bf16" {
                gemm::kernel::<bf16>(Target::HOPPER, l, t)
            } else {
                gemm::kernel::<f16>(Target::HOPPER, l, t)
            }
        }
        _ => {
            // fwd dtype d mask groups cols depth join regs0 regs1 early rescale
            let d = n(2);
            let mask = match args[3].as_str() {
                "full" => Mask::none(),
                "causal" => Mask::causal(),
                "window" => Mask::causal().and(Mask::window(Some(1023), None)),
                _ => panic!(),
            };
            let rescale: Rescale = args[11].parse().unwrap();
            let t = Tuning {
                groups: n(4),
                cols: n(5),
                depth: n(6),
                join: n(7) == 1,
                registers: [n(8), n(9)],
                early: n(10),
                rescale,
            };
            let f = Features { dims: [d, d], mask, exp: Exp::Auto };
            if args[1] == "bf16" {
                forward::kernel::<bf16>(Target::HOPPER, &f, t)
            } else {
                forward::kernel::<f16>(Target::HOPPER, &f, t)
            }
        }
    };
    match k {
        Ok(k) => {
            eprintln!("smem {} threads {}", k.shared_bytes, k.threads);
            print!("{}", k.ptx())
        }
        Err(e) => {
            eprintln!("{e}");
            std::process::exit(1)
        }
    }
}

//! The real assembler on kernels with planted faults: each must be found and lead to its Rust line.
//!
//! The variable PTXAS names the assembler, as `cargo xtask test` does; without it these tests say that they were
//! skipped.

use fulgurite_ptx::assemble::{AssembleError, Assembler, Fault, Hints};
use fulgurite_ptx::{Kernel, Major, Number, Sum, Target, TileShape, Warpgroups, Warps, bf16};
use std::cell::Cell;
use std::path::Path;

fn assembler() -> Option<Assembler> {
    let Some(path) = std::env::var_os("PTXAS").filter(|path| !path.is_empty()) else {
        println!("skipped: the variable PTXAS does not name an assembler");
        return None;
    };
    Some(Assembler::find(&Hints { ptxas: Some(path.into()), ..Hints::default() }).unwrap())
}

#[test]
fn a_clean_kernel() {
    let Some(assembler) = assembler() else { return };
    let kernel = Kernel::build("clean", Target::HOPPER, |k| {
        let (x, cache) = (k.pointer::<f32>("x"), k.shared::<f32>("cache", 64));
        k.threads(64, |w| {
            cache.store(w, w.thread(), x.load(w, w.thread()));
            w.sync();
            x.store(w, w.thread(), cache.load(w, w.thread() ^ 1));
        });
    })
    .unwrap();
    let report = assembler.assemble(&kernel).unwrap();
    assert_eq!(report.verdict(), Ok(()));
    assert_eq!((report.spill_stores_bytes, report.spill_loads_bytes, report.stack_bytes), (0, 0, 0));
    assert_eq!((report.shared_bytes, report.barriers), (256, 1));
    assert!((1..=32).contains(&report.registers), "{}", report.registers);
    assert!(!report.time.is_zero());
    assert_eq!(&report.cubin[..4], b"\x7fELF");
    assert!(assembler.version().unwrap().starts_with(|c: char| c.is_ascii_digit()));
}

#[test]
fn spills_are_found_with_their_lines() {
    let Some(assembler) = assembler() else { return };
    let line = Cell::new(0);
    let kernel = Kernel::build("spills", Target::HOPPER, |k| {
        let x = k.pointer::<f32>("x");
        // 1024 threads have 64 registers each; 120 values are alive across the barrier.
        k.threads(1024, |w| {
            line.set(line!() + 1);
            let values: Vec<_> = (0..120u32).map(|i| x.load(w, i)).collect();
            w.sync();
            for (i, value) in values.into_iter().enumerate() {
                x.store(w, 500 - i as u32, value);
            }
        });
    })
    .unwrap();
    let report = assembler.assemble(&kernel).unwrap();
    let faults = report.verdict().unwrap_err();
    let [Fault::Spills { stores_bytes, loads_bytes, at }] = &faults[..] else { panic!("{faults:?}") };
    assert!(*stores_bytes >= 4 * 56 && *loads_bytes >= 4 * 56, "{faults:?}");
    if assembler.nvdisasm().is_some() {
        assert!(at.iter().any(|at| at.to_string() == format!("{}:{}", file!(), line.get())), "{faults:?}");
    }
}

#[test]
fn a_product_that_is_read_too_early_is_found_with_its_line() {
    let Some(assembler) = assembler() else { return };
    let line = Cell::new(0);
    let build = |waits: bool| {
        let shape = TileShape::new(Number::Bf16, 64, 64);
        Kernel::build("early", Target::HOPPER, |k| {
            let (a, c) = (k.tile("a", shape), k.tile("c", shape));
            k.role("multiply", Warpgroups(1), |w| {
                let acc = w.accumulators(64);
                w.multiply(&acc, a.operand(Major::Inner), a.operand(Major::Inner), Sum::Fresh);
                if waits {
                    w.wait_products(0);
                }
                line.set(line!() + 1);
                w.write::<bf16>(c, &acc);
            });
        })
        .unwrap()
    };
    assert_eq!(assembler.assemble(&build(true)).unwrap().verdict(), Ok(()));
    let faults = assembler.assemble(&build(false)).unwrap().verdict().unwrap_err();
    let Some(Fault::Remark(message)) = faults.first() else { panic!("{faults:?}") };
    assert_eq!(message.code.as_deref(), Some("C7517"));
    assert_eq!(message.at.as_ref().unwrap().to_string(), format!("{}:{}", file!(), line.get()));
}

/// Exponentials of one product are to run beside another. Nothing makes a plain wait come after them, and the assembler
/// moves it up; the wait of the language needs them, and stays.
#[test]
fn a_wait_that_is_moved_over_exponentials_is_found_with_its_line() {
    let Some(assembler) = assembler() else { return };
    if assembler.nvdisasm().is_none() {
        println!("skipped: there is no disassembler");
        return;
    }
    #[derive(Clone, Copy)]
    enum Wait {
        After,
        Plain,
        Anywhere,
    }
    let lines = Cell::new([0; 2]);
    let build = |wait: Wait| {
        let shape = TileShape::new(Number::Bf16, 64, 64);
        Kernel::build("beside", Target::HOPPER, |k| {
            let (a, c, sums) = (k.tile("a", shape), k.tile("c", shape), k.pointer::<f32>("sums"));
            k.role("multiply", Warpgroups(1), |w| {
                let (s, o) = (w.accumulators(64), w.accumulators(64));
                w.multiply(&s, a.operand(Major::Inner), a.operand(Major::Inner), Sum::Fresh);
                w.multiply(&o, a.operand(Major::Inner), a.operand(Major::Outer), Sum::Fresh);
                w.wait_products(1);
                let exponential = line!() + 1;
                let sum = s.elements().map(|x| x.exp2()).reduce(|a, b| a + b).unwrap();
                match wait {
                    Wait::After => w.wait_products_after(0, &[sum]),
                    Wait::Anywhere => w.wait_products_anywhere(0),
                    Wait::Plain => {
                        lines.set([line!() + 1, exponential]);
                        w.wait_products(0)
                    }
                }
                w.write::<bf16>(c, &o);
                sums.store(w, w.thread(), sum);
            });
        })
        .unwrap()
    };
    for wait in [Wait::After, Wait::Anywhere] {
        assert_eq!(assembler.assemble(&build(wait)).unwrap().verdict(), Ok(()));
    }
    let faults = assembler.assemble(&build(Wait::Plain)).unwrap().verdict().unwrap_err();
    let [Fault::MovedWait(moved)] = &faults[..] else { panic!("{faults:?}") };
    let [wait, exponential] = lines.get().map(|line| format!("{}:{line}", file!()));
    assert_eq!(moved.at.as_ref().unwrap().to_string(), wait);
    assert_eq!(moved.first.as_ref().unwrap().to_string(), exponential);
    assert!(!moved.dropped && moved.exponentials > 16, "{moved:?}");
    assert!(
        faults[0].to_string().starts_with(&format!("{wait}: the wait for products was moved up, ")),
        "{}",
        faults[0]
    );
    // Where nobody disassembles, nobody is told.
    assert_eq!(assembler.without_disassembler().assemble(&build(Wait::Plain)).unwrap().verdict(), Ok(()));
}

#[test]
fn registers_that_roles_exchange_are_kept() {
    let Some(assembler) = assembler() else { return };
    let kernel = Kernel::build("roles", Target::HOPPER, |k| {
        k.role("load", Warpgroups(1).registers(40), |_| {});
        k.role("multiply", Warpgroups(2).registers(232), |_| {});
    })
    .unwrap();
    assert_eq!(assembler.assemble(&kernel).unwrap().verdict(), Ok(()));
    if assembler.nvdisasm().is_some() {
        let sass = assembler.sass(&kernel).unwrap();
        assert_eq!(sass.matches("USETMAXREG").count(), 2, "{sass}");
    }
}

/// One change for a warpgroup, before its roles part, on every architecture that has it.
#[test]
fn roles_of_single_warps_share_their_registers() {
    let Some(assembler) = assembler() else { return };
    for name in ["sm_90a", "sm_100a", "sm_103a", "sm_120a"] {
        let kernel = Kernel::build("roles", Target::named(name).unwrap(), |k| {
            let x = k.pointer::<f32>("x");
            k.role("compute", Warpgroups(2).registers(232), |w| x.store(w, w.thread(), 1.0));
            k.role("load", Warps(1).registers(40), |w| x.store(w, w.thread(), 2.0));
            k.role("multiply", Warps(2), |w| x.store(w, w.thread(), 3.0));
            k.role("store", Warps(1), |w| x.store(w, w.thread(), 4.0));
        })
        .unwrap();
        assert_eq!(assembler.assemble(&kernel).unwrap().verdict(), Ok(()), "{name}");
        if assembler.nvdisasm().is_some() {
            let sass = assembler.sass(&kernel).unwrap();
            assert_eq!(sass.matches("USETMAXREG").count(), 2, "{sass}");
        }
    }
}

#[test]
fn text_that_is_refused_names_its_line() {
    let Some(assembler) = assembler() else { return };
    let mut kernel = Kernel::build("refused", Target::HOPPER, |k| {
        let x = k.pointer::<f32>("x");
        k.threads(32, |w| x.store(w, 0, 1.0));
    })
    .unwrap();
    kernel.registers = [0; 5]; // as a mistake of the printer would leave it
    let refused = assembler.assemble(&kernel).unwrap_err();
    let AssembleError::Refused { messages, .. } = &refused else { panic!("{refused:?}") };
    assert!(messages.iter().any(|m| m.at.as_ref().is_some_and(|at| at.file == file!())), "{refused}");
    assert!(refused.to_string().starts_with("kernel `refused` was not assembled for sm_90a: "), "{refused}");
}

#[test]
fn nothing_is_left_behind() {
    let Some(assembler) = assembler() else { return };
    let kernel = Kernel::build("k", Target::AMPERE, |k| k.threads(32, |_| {})).unwrap();
    assembler.assemble(&kernel).unwrap();
    let own = format!("fulgurite-{}-", std::process::id());
    // Other tests of this process may be at work; what is there must go.
    let left = || {
        let all = std::fs::read_dir(std::env::temp_dir()).unwrap().flatten();
        all.filter(|entry| entry.file_name().to_string_lossy().starts_with(&own)).count()
    };
    let start = std::time::Instant::now();
    while left() > 0 {
        assert!(start.elapsed().as_secs() < 30, "{} folders were left", left());
        std::thread::yield_now();
    }
}

#[test]
fn tools_are_found_where_the_hints_say() {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tools");
    let _ = std::fs::remove_dir_all(&home);
    let touch = |path: &Path| {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"").unwrap();
    };
    let exe = std::env::consts::EXE_SUFFIX;
    let bin = home.join("venv/lib/python3.11/site-packages/nvidia/cu13/bin");
    let folder = home.join("path");
    let (packaged, on_path) = (bin.join(format!("ptxas{exe}")), folder.join(format!("ptxas{exe}")));
    let in_environment = Hints { environments: vec![home.join("venv")], ..Hints::default() };

    let refused = Assembler::find(&in_environment).unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!(
            "`ptxas` was not found in PATH, {}; `pip install nvidia-cuda-nvcc==13.0.88` in a Python environment brings it, no GPU is needed",
            home.join("venv").display()
        )
    );
    touch(&packaged);
    let found = Assembler::find(&in_environment).unwrap();
    assert_eq!((found.ptxas(), found.nvdisasm()), (packaged.as_path(), None));
    let kernel = Kernel::build("k", Target::AMPERE, |k| k.threads(32, |_| {})).unwrap();
    assert_eq!(
        found.sass(&kernel).unwrap_err().to_string(),
        format!(
            "`nvdisasm` was not found beside {} or on the path; `pip install nvidia-cuda-nvdisasm==13.4.92` in the same environment brings it",
            packaged.display()
        )
    );

    touch(&on_path);
    let hints = Hints { path: Some(folder.clone().into()), ..in_environment };
    assert_eq!(Assembler::find(&hints).unwrap().ptxas(), on_path);
    let disassembler = bin.join(format!("nvdisasm{exe}"));
    touch(&disassembler);
    assert_eq!(Assembler::find(&hints).unwrap().nvdisasm(), Some(disassembler.as_path()));
    let given = Hints { ptxas: Some(packaged.clone()), ..hints };
    assert_eq!(Assembler::find(&given).unwrap().ptxas(), packaged);
}

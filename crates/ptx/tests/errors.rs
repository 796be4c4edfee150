//! Every way a kernel is refused, with the whole message: it must be enough to repair the kernel.

use fulgurite_ptx::{
    BuildError, Builder, GlobalRows, Group, Kernel, Major, Number, Scope, Sum, Swizzle, Target, TileShape, WarpAcc,
    Warpgroups, Warps, Which, bf16, f16,
};
use std::cell::Cell;

fn refused_for(target: Target, f: impl FnOnce(&Builder)) -> BuildError {
    Kernel::build("k", target, f).expect_err("the kernel should be refused")
}

/// The message with which a kernel for Hopper is refused.
fn refused(f: impl FnOnce(&Builder)) -> String {
    refused_for(Target::HOPPER, f).to_string()
}

/// A line of this file, as messages name it.
fn here(line: u32) -> String {
    format!("{}:{line}", file!())
}

/// A kernel of one role, two warpgroups.
fn in_group<'k>(k: &'k Builder, f: impl FnOnce(&Scope<'k, Group>)) {
    k.role("work", Warpgroups(2), f);
}

const TILE: TileShape = TileShape { number: Number::Bf16, rows: 64, cols: 64, swizzle: Swizzle::B128 };

#[test]
fn shared_memory() {
    let message = |target| {
        let refused = refused_for(target, |k| {
            let _ = k.shared::<f32>("scores", 60_000);
            let _ = k.shared::<u32>("rows", 4);
            k.threads(32, |_| {});
        });
        assert!(matches!(refused, BuildError::SharedMemory { used: 240_016, .. }), "{refused:?}");
        refused.to_string()
    };
    let uses = "it is used by scores (240000), rows (16)";
    assert_eq!(
        message(Target::HOPPER),
        format!("kernel `k` takes 240016 bytes of shared memory, allowed: 232448 on sm_90a; {uses}")
    );
    assert_eq!(
        message(Target::AMPERE),
        format!("kernel `k` takes 240016 bytes of shared memory, allowed: 166912 on sm_80; {uses}")
    );
    for (name, allowed) in [("sm_86", 101_376), ("sm_89", 101_376), ("sm_100a", 232_448), ("sm_120a", 101_376)] {
        assert_eq!(
            message(Target::named(name).unwrap()),
            format!("kernel `k` takes 240016 bytes of shared memory, allowed: {allowed} on {name}; {uses}")
        );
    }
}

#[test]
fn registers_over_the_pool() {
    let message = refused(|k| {
        k.role("load", Warpgroups(1).registers(40), |_| {});
        k.role("multiply", Warpgroups(2).registers(240), |_| {});
    });
    assert_eq!(
        message,
        "kernel `k`: its roles take 66560 registers, allowed: 64512 (what 384 threads have at entry); load: 128 x 40, multiply: 256 x 240"
    );
    // A role that says nothing keeps what it had at entry, and that counts too.
    let message = refused(|k| {
        k.role("load", Warpgroups(1), |_| {});
        k.role("multiply", Warpgroups(2).registers(232), |_| {});
    });
    assert_eq!(
        message,
        "kernel `k`: its roles take 80896 registers, allowed: 64512 (what 384 threads have at entry); load: 128 x 168, multiply: 256 x 232"
    );
    let fits = Kernel::build("k", Target::HOPPER, |k| {
        k.role("load", Warpgroups(1).registers(40), |_| {});
        k.role("multiply", Warpgroups(2).registers(232), |_| {});
    });
    assert!(fits.is_ok(), "{fits:?}");
}

#[test]
fn registers_of_roles_that_share_a_warpgroup() {
    let line = Cell::new(0);
    let message = refused(|k| {
        k.role("compute", Warpgroups(2).registers(208), |_| {});
        k.role("load", Warps(1).registers(40), |_| {});
        line.set(line!() + 1);
        k.role("store", Warps(3).registers(24), |_| {});
    });
    assert_eq!(
        message,
        format!(
            "kernel `k`, {}: role `store` asks for 24 registers and shares a warpgroup with role `load`, which asks for 40; allowed: equal numbers, or roles of whole warpgroups",
            here(line.get())
        )
    );
    let message = refused(|k| {
        k.role("compute", Warpgroups(2), |_| {});
        line.set(line!() + 1);
        k.role("load", Warps(2).registers(40), |_| {});
    });
    assert_eq!(
        message,
        format!(
            "kernel `k`, {}: role `load` asks for registers in a warpgroup of fewer than four warps, allowed: whole warpgroups; add warps to `load`",
            here(line.get())
        )
    );
    // One that asks for none has what the other has.
    let kernel = Kernel::build("k", Target::HOPPER, |k| {
        k.role("compute", Warpgroups(2).registers(232), |_| {});
        k.role("load", Warps(1).registers(40), |_| {});
        k.role("store", Warps(3), |_| {});
    })
    .unwrap();
    let roles: Vec<_> = kernel.roles.iter().map(|role| (role.first_warp, role.warps, role.registers)).collect();
    assert_eq!(roles, [(0, 8, Some(232)), (8, 1, Some(40)), (9, 3, Some(40))]);
    assert_eq!(kernel.ptx().matches("setmaxnreg").count(), 2);
}

#[test]
fn warps_of_roles() {
    let line = Cell::new(0);
    let message = refused(|k| {
        k.role("load", Warps(1), |_| {});
        line.set(line!() + 1);
        k.role("compute", Warpgroups(1), |_| {});
    });
    assert_eq!(
        message,
        format!(
            "kernel `k`, {}: role `compute` of whole warpgroups begins at warp 1, allowed: multiples of 4; declare it before roles of fewer warps",
            here(line.get())
        )
    );
    let message = refused(|k| {
        line.set(line!() + 1);
        k.role("load", Warps(0), |_| {});
    });
    assert_eq!(message, format!("kernel `k`, {}: role `load` has no warps, allowed: 1 or more", here(line.get())));
}

#[test]
fn register_counts() {
    for count in [0, 16, 100, 264] {
        let message = refused(|k| k.role("load", Warpgroups(1).registers(count), |_| {}));
        let want =
            format!("kernel `k`, role `load`: {count} registers a thread, allowed: multiples of 8 from 24 to 256");
        assert_eq!(message, want);
    }
}

#[test]
fn barriers() {
    let message = refused(|k| {
        in_group(k, |w| {
            for _ in 0..8 {
                w.sync_group(&w.group_barrier());
            }
        });
    });
    assert_eq!(message, "kernel `k` takes 17 named barriers, allowed: 16; use an mbarrier for some");
}

#[test]
fn threads() {
    for count in [0, 16, 48, 1056] {
        let message = refused(|k| k.threads(count, |_| {}));
        assert_eq!(
            message,
            format!("kernel `k` has {count} threads a block, allowed: multiples of 32 from 32 to 1024")
        );
    }
    let message = refused(|k| k.role("work", Warpgroups(9), |_| {}));
    assert_eq!(message, "kernel `k` has 1152 threads a block, allowed: multiples of 32 from 32 to 1024");
    let message = refused(|_| {});
    assert_eq!(message, "kernel `k` has 0 threads a block, allowed: multiples of 32 from 32 to 1024");
}

#[test]
fn what_a_target_lacks() {
    let line = Cell::new(0);
    let build = |k: &Builder| {
        k.threads(32, |w| {
            line.set(line!() + 1);
            w.wait_for_previous_grid();
        });
    };
    let refused = refused_for(Target::AMPERE, build);
    assert!(matches!(refused, BuildError::Needs { .. }), "{refused:?}");
    assert_eq!(
        refused.to_string(),
        format!(
            "kernel `k`, {}: `griddepcontrol.wait` needs PTX 8.0 and sm_90 or later, and this is printed for sm_80, PTX up to 9.0",
            here(line.get())
        )
    );
    assert!(Kernel::build("k", Target::HOPPER, build).is_ok());
    // A driver that is too old for an instruction of its own GPU.
    let old = Target { ptx: (7, 8), ..Target::HOPPER };
    assert_eq!(
        refused_for(old, build).to_string(),
        format!(
            "kernel `k`, {}: `griddepcontrol.wait` needs PTX 8.0 and sm_90 or later, and this is printed for sm_90a, PTX up to 7.8",
            here(line.get())
        )
    );
    // What later GPUs lost.
    let later = Target::named("sm_100a").unwrap();
    let refused = refused_for(later, |k| {
        in_group(k, |w| {
            line.set(line!() + 1);
            w.wait_products(0);
        });
    });
    assert_eq!(
        refused.to_string(),
        format!(
            "kernel `k`, {}: `wgmma.wait_group` needs PTX 8.0 and sm_90a alone, and this is printed for sm_100a, PTX up to 9.0",
            here(line.get())
        )
    );
}

#[test]
fn what_a_target_lacks_comes_before_what_does_not_fit() {
    let refused = refused_for(Target::AMPERE, |k| {
        let _ = k.shared::<f32>("scores", 60_000);
        k.threads(32, |w| w.wait_for_previous_grid());
    });
    assert!(matches!(refused, BuildError::Needs { .. }), "{refused:?}");
}

#[test]
fn divergence() {
    let (branch, at) = (Cell::new(0), Cell::new(0));
    let message = refused(|k| {
        k.threads(32, |w| {
            branch.set(line!() + 1);
            w.when(w.lane().lt(7), |w| {
                at.set(line!() + 1);
                w.sync_warp();
            });
        });
    });
    let want = |inst: &str| {
        format!(
            "kernel `k`, {}: `{inst}` is executed by whole warps together, and the branch at {} depends on the lane",
            here(at.get()),
            here(branch.get())
        )
    };
    assert_eq!(message, want("bar.warp.sync"));
    // A loop that some lanes leave earlier.
    let message = refused(|k| {
        k.threads(32, |w| {
            branch.set(line!() + 1);
            w.each(0, w.lane(), 1, |w, _| {
                at.set(line!() + 1);
                w.sync_warp();
            });
        });
    });
    assert_eq!(message, want("bar.warp.sync"));
    // What was read from memory at an address that differs between lanes differs too.
    let message = refused(|k| {
        let x = k.pointer::<u32>("x");
        k.threads(32, |w| {
            branch.set(line!() + 1);
            w.when(x.load(w, w.thread()).eq(0), |w| {
                at.set(line!() + 1);
                w.sync();
            });
        });
    });
    assert_eq!(message, want("bar.sync.all"));
    // The same in all lanes: a parameter, a block number, a vote, what one lane has.
    let fine = Kernel::build("k", Target::HOPPER, |k| {
        let (n, x) = (k.param::<u32>("n"), k.pointer::<u32>("x"));
        k.threads(32, |w| {
            w.when(n.lt(w.cta()), |w| w.sync_warp());
            w.when(w.any(w.lane().eq(3)), |w| w.sync_warp());
            w.when(x.load(w, w.cta()).eq(0), |w| w.sync_warp());
        });
    });
    assert!(fine.is_ok(), "{fine:?}");
}

#[test]
fn shapes_of_tensors() {
    let line = Cell::new(0);
    let message = refused(|k| {
        line.set(line!() + 1);
        let _ = k.tensor("x", TILE, 6);
        k.threads(32, |_| {});
    });
    assert_eq!(message, format!("kernel `k`, {}: tensor `x` has 6 axes, allowed: 2 to 5", here(line.get())));
    let message = refused(|k| {
        line.set(line!() + 1);
        let _ = k.tensor("x", TileShape { rows: 264, ..TILE }, 2);
        k.threads(32, |_| {});
    });
    assert_eq!(
        message,
        format!("kernel `k`, {}: tensor `x` is moved in boxes of 264 rows, allowed: up to 256", here(line.get()))
    );
    for rank in [2usize, 6] {
        let message = refused(|k| {
            let (x, tile) = (k.tensor("x", TILE, rank as u32), k.tile("tile", TILE));
            k.threads(32, |w| {
                w.one_thread(|t| {
                    if rank == 2 {
                        line.set(line!() + 1);
                        t.store_tile(&x, &[t.constant(0); 3], tile);
                    } else {
                        t.store_tile(&x, &[t.constant(0); 6], tile);
                        t.prefetch_tile(&x, &[t.constant(0); 6]);
                    }
                });
            });
        });
        if rank == 2 {
            assert_eq!(message, format!("kernel `k`, {}: 3 coordinates for a tensor of 2 axes", here(line.get())));
        } else {
            assert!(message.ends_with("tensor `x` has 6 axes, allowed: 2 to 5"), "{message}");
        }
    }
    let message = refused(|k| {
        let (x, tile) = (k.tensor("x", TILE, 2), k.tile("tile", TILE));
        k.threads(32, |w| {
            w.one_thread(|t| {
                line.set(line!() + 1);
                t.store_tile(&x, &[], tile);
            });
        });
    });
    assert_eq!(message, format!("kernel `k`, {}: 0 coordinates for a tensor of 2 axes", here(line.get())));
}

#[test]
fn shapes_of_tiles() {
    let line = Cell::new(0);
    for count in [12, 128] {
        let message = refused(|k| {
            let tile = k.tile("tile", TILE);
            k.threads(32, |_| {
                line.set(line!() + 1);
                let _ = tile.rows(0, count);
            });
        });
        assert_eq!(
            message,
            format!(
                "kernel `k`, {}: {count} rows of a tile of 64, allowed: multiples of 8 up to that",
                here(line.get())
            )
        );
    }
    let message = refused(|k| {
        let tile = k.tile("tile", TILE);
        k.threads(32, |_| {
            line.set(line!() + 1);
            let _ = tile.cols(0, 32);
        });
    });
    assert_eq!(
        message,
        format!("kernel `k`, {}: 32 columns of a tile of 64, allowed: multiples of 64 up to 64", here(line.get()))
    );
}

#[test]
fn shapes_of_products() {
    let line = Cell::new(0);
    let message = refused(|k| {
        in_group(k, |w| {
            line.set(line!() + 1);
            let _ = w.accumulators(100);
        });
    });
    assert_eq!(
        message,
        format!("kernel `k`, {}: accumulators of 100 columns, allowed: multiples of 8 up to 256", here(line.get()))
    );
    let message = refused(|k| {
        in_group(k, |w| {
            line.set(line!() + 1);
            let _ = w.accumulators(64).part(2, 32);
        });
    });
    assert_eq!(
        message,
        format!("kernel `k`, {}: part 2 of 32 columns of 64, allowed: multiples of 8 inside", here(line.get()))
    );
    let message = refused(|k| {
        let (a, b) = (k.tile("a", TILE), k.tile("b", TileShape { number: Number::F16, ..TILE }));
        in_group(k, |w| {
            let acc = w.accumulators(128);
            line.set(line!() + 1);
            w.multiply(&acc, a.operand(Major::Inner), b.operand(Major::Inner), Sum::Fresh);
        });
    });
    assert_eq!(
        message,
        format!(
            "kernel `k`, {}: a product of Bf16 64x64 times F16 64x64 into 64x128, allowed: 64 rows, equal inner sizes and types, matching columns",
            here(line.get())
        )
    );
    let message = refused(|k| {
        let a = k.tile("a", TileShape::new(Number::S8, 64, 128));
        in_group(k, |w| {
            let acc = w.accumulators(64);
            line.set(line!() + 1);
            w.multiply(&acc, a.operand(Major::Inner), a.operand(Major::Inner), Sum::Fresh);
        });
    });
    assert_eq!(
        message,
        format!(
            "kernel `k`, {}: a product of S8 into F32, allowed: F16, Bf16, Tf32, E4m3 and E5m2 into F32, S8 and U8 into S32",
            here(line.get())
        )
    );
    let message = refused(|k| {
        let a = k.tile("a", TileShape::new(Number::E4m3, 64, 64));
        in_group(k, |w| {
            let acc = w.accumulators(64);
            line.set(line!() + 1);
            w.multiply(&acc, a.operand(Major::Inner), a.operand(Major::Outer), Sum::Fresh);
        });
    });
    assert_eq!(
        message,
        format!(
            "kernel `k`, {}: a product of E4m3 summed over rows of a tile, allowed: along them ([k] contiguous)",
            here(line.get())
        )
    );
}

#[test]
fn products_of_single_warps() {
    let line = Cell::new(0);
    let product = |a: TileShape, b: TileShape, major: Major| {
        let refused = refused_for(Target::AMPERE, |k| {
            let (a, b) = (k.tile("a", a), k.tile("b", b));
            k.role("all", Warps(2), |w| {
                let acc: WarpAcc<'_, 2> = w.warp_accumulators(32);
                let zero = w.constant(0);
                line.set(line!() + 1);
                w.multiply_warp(&acc, (a.operand(Major::Inner), zero), (b.operand(major), zero));
            });
        });
        refused.to_string()
    };
    let bytes = TileShape::new(Number::S8, 32, 64);
    assert_eq!(
        product(bytes, bytes, Major::Inner),
        format!(
            "kernel `k`, {}: a product of s8 and s8 into f32, allowed: f16, bf16, tf32, e4m3 and e5m2 into f32, s8 and u8 into s32",
            here(line.get())
        )
    );
    let half = TileShape::new(Number::Bf16, 32, 64);
    let few = TileShape::new(Number::Bf16, 16, 64);
    let deep = TileShape::new(Number::Bf16, 32, 128);
    let plain = TileShape { swizzle: Swizzle::None, ..half };
    let wide = TileShape::new(Number::Tf32, 32, 32);
    for (a, b, major) in [
        (few, half, Major::Inner),
        (half, few, Major::Inner),
        (half, deep, Major::Inner),
        (plain, half, Major::Inner),
        (wide, wide, Major::Outer),
    ] {
        let message = product(a, b, major);
        assert!(message.contains("allowed: equal inner sizes, as many rows and columns, swizzled tiles"), "{message}");
    }
    // Floats of 8 bits came with Ada.
    let fp8 = TileShape::new(Number::E4m3, 32, 64);
    let message = product(fp8, fp8, Major::Inner);
    assert!(message.contains("`mma.fp8` needs PTX 8.4 and sm_89 or later"), "{message}");
    let message = refused_for(Target::AMPERE, |k| {
        k.role("all", Warps(1), |w| {
            line.set(line!() + 1);
            let _: WarpAcc<'_, 1> = w.warp_accumulators(24);
        });
    });
    assert_eq!(
        message.to_string(),
        format!(
            "kernel `k`, {}: accumulators of 1 blocks of rows and 24 columns, allowed: 1 block or more, multiples of 16 columns",
            here(line.get())
        )
    );
}

#[test]
fn rings_of_copies() {
    let line = Cell::new(0);
    let shape = TileShape::new(Number::Bf16, 64, 64);
    let message = refused_for(Target::AMPERE, |k| {
        line.set(line!() + 1);
        let _ = k.copy_ring("tiles", 1, &[shape]);
    });
    assert_eq!(
        message.to_string(),
        format!("kernel `k`, {}: ring `tiles` has 1 stages, allowed: 2 or more", here(line.get()))
    );
    let message = refused_for(Target::AMPERE, |k| {
        let x = k.pointer::<u32>("x");
        let ring = k.copy_ring("tiles", 2, &[shape]);
        k.role("all", Warps(1), |w| {
            let (stride, rows) = (w.constant(128u64), w.constant(64));
            let from = GlobalRows { address: x.address(), stride, rows, skip: None, bytes: w.constant(128) };
            line.set(line!() + 1);
            ring.put(w, |w, tiles| ring.copy(w, tiles[0], from));
        });
    });
    assert_eq!(
        message.to_string(),
        format!(
            "kernel `k`, {}: 32 threads copy rows of 8 units of 16 bytes, allowed: 8 threads or a multiple for each unit of a chunk",
            here(line.get())
        )
    );
    let message = refused_for(Target::AMPERE, |k| {
        let ring = k.copy_ring("tiles", 2, &[shape]);
        k.role("all", Warps(4), |w| ring.put(w, |_, _| {}));
    });
    assert!(message.to_string().contains("pipe `tiles` is never emptied"), "{message}");
}

#[test]
fn results_are_written_in_the_type_of_their_tile() {
    let line = Cell::new(0);
    let message = refused(|k| {
        let tile = k.tile("tile", TILE);
        in_group(k, |w| {
            let acc = w.accumulators(64);
            line.set(line!() + 1);
            w.write::<f16>(tile, &acc);
        });
    });
    assert_eq!(
        message,
        format!(
            "kernel `k`, {}: 64x64 f16 written to 64 rows of {TILE:?}, allowed: 64 rows, the same type, multiples of 16 columns",
            here(line.get())
        )
    );
    let fine = Kernel::build("k", Target::HOPPER, |k| {
        let tile = k.tile("tile", TILE);
        in_group(k, |w| w.write::<bf16>(tile, &w.accumulators(64)));
    });
    assert!(fine.is_ok(), "{fine:?}");
}

#[test]
fn pipes_with_one_end() {
    let message = refused(|k| {
        let ring = k.pipe("ring", 2, &[TILE]);
        in_group(k, |w| {
            let _ = ring.take(w);
            ring.release(w);
        });
    });
    let end = "a ring needs one role that fills and one that empties it";
    assert_eq!(message, format!("kernel `k`: pipe `ring` is never filled; {end}"));
    let message = refused(|k| {
        let (x, ring) = (k.tensor("x", TILE, 2), k.pipe("ring", 2, &[TILE]));
        in_group(k, |w| {
            w.one_thread(|t| ring.put(t, |t, stage| stage.load(t, stage.tile(0), &x, &[t.constant(0); 2])));
        });
    });
    assert_eq!(message, format!("kernel `k`: pipe `ring` is never emptied; {end}"));
}

#[test]
fn the_first_mistake_is_reported() {
    let message = refused(|k| {
        in_group(k, |w| {
            let _ = w.accumulators(100);
            let _ = w.accumulators(1000);
        });
        let _ = k.pipe("ring", 2, &[TILE]);
    });
    assert!(message.contains("accumulators of 100 columns"), "{message}");
}

#[test]
fn outboxes() {
    let message = refused(|k| {
        let ring = k.pipe("q", 3, &[TILE]);
        let _ = k.bulk_reducer("sums", 2, 512).in_step(&ring);
        in_group(k, |_| {});
    });
    assert!(message.contains("a bulk reducer in step with a ring of 3 stages, allowed: 2"), "{message}");
    let message = refused(|k| {
        let _ = k.bulk_reducer("sums", 2, 100);
        in_group(k, |_| {});
    });
    assert!(message.contains("bulk reducer `sums` has places for 100 numbers, allowed: multiples of 512"), "{message}");
    let message = refused(|k| {
        let outbox = k.bulk_reducer("sums", 2, 512);
        in_group(k, |w| {
            outbox.as_tile(w, TILE);
        });
    });
    assert!(message.contains("a tile of 8192 bytes in a place of 2048"), "{message}");
}

#[test]
fn swaps() {
    let message = refused(|k| {
        let ring = k.pipe("q", 3, &[TILE]);
        k.double_tile("d_z", TILE, &ring);
        in_group(k, |_| {});
    });
    assert!(message.contains("double tile `d_z` in step with a ring of 3 stages, allowed: 2"), "{message}");
}

#[test]
fn fragments_turned() {
    let message = refused(|k| {
        let tile = k.tile("d_z", TileShape { rows: 32, ..TILE });
        in_group(k, |w| w.write_fragment_turned(tile, &w.fragment::<bf16>(64)));
    });
    assert!(message.contains("64x64 bf16 written to columns of 32 rows"), "{message}");
}

/// Tensor memory of pairs: only in clusters of two CTAs, never beside that of single CTAs, and no more than there is.
#[test]
fn pairs_of_ctas() {
    let line = Cell::new(0);
    let message = |f: &dyn Fn(&Builder)| refused_for(Target::named("sm_100a").unwrap(), |k| f(k)).to_string();
    let refused = message(&|k| {
        line.set(line!() + 1);
        let _ = k.cta_pair();
        k.threads(32, |_| {});
    });
    let what = "a pair of CTAs in clusters of 1, allowed: 2; call `cluster(2)` first";
    assert_eq!(refused, format!("kernel `k`, {}: {what}", here(line.get())));
    let refused = message(&|k| {
        k.cluster(2);
        line.set(line!() + 1);
        let pair = k.cta_pair();
        let _ = pair.tensor_ring("sums", 1, 2, 128);
        let _ = k.tensor_ring("others", 1, 1, 64);
        k.threads(32, |_| {});
    });
    let [first, second] = [line.get(), line.get() + 2].map(here);
    assert_eq!(
        refused,
        format!(
            "kernel `k`, {second}: tensor memory of single CTAs, and of a pair of CTAs at {first}, allowed: one of the two in a kernel"
        )
    );
    let refused = message(&|k| {
        k.cluster(2);
        let pair = k.cta_pair();
        let _ = pair.tensor_ring("sums", 1, 2, 256);
        line.set(line!() + 1);
        let _ = pair.tensor_accumulators(1, 64);
        k.threads(32, |_| {});
    });
    let what = "576 columns of tensor memory: sums (512), accumulators (64), allowed: 512 on sm_100a";
    assert_eq!(refused, format!("kernel `k`, {}: {what}", here(line.get())));
    let refused = message(&|k| {
        k.cluster(2);
        let pair = k.cta_pair();
        let (acc, tile) = (pair.tensor_accumulators(1, 64), k.tile("tile", TileShape { rows: 128, ..TILE }));
        k.role("multiply", Warps(1), |w| {
            w.elected(|t| {
                line.set(line!() + 1);
                t.multiply_tensor(acc, tile.operand(Major::Inner), tile.operand(Major::Inner), Sum::Fresh)
            });
        });
    });
    let what = "a product of Bf16 128x64 times Bf16 64x128 into F32 128x64";
    assert!(refused.starts_with(&format!("kernel `k`, {}: {what}", here(line.get()))), "{refused}");
    assert!(refused.ends_with("half of the columns in each CTA"), "{refused}");
}

/// Parts of tensor memory, of fragments and of operands that are not whole columns, pairs or steps.
#[test]
fn parts_of_tensor_memory() {
    let blackwell = Target::named("sm_100a").unwrap();
    let message = |f: &dyn for<'k> Fn(&'k Builder, &Scope<'k, Group>)| {
        refused_for(blackwell, |k| k.role("work", Warpgroups(1), |w| f(k, w))).to_string()
    };
    for (got, part) in [
        (
            message(&|_, w| _ = w.row_fragment::<bf16>(64).range(3..16)),
            "columns 3..16 of 64, allowed: pairs inside rows of one thread",
        ),
        (
            message(&|k, _| _ = k.tensor_accumulators(1, 64).overlay::<bf16>(64).range(16..65)),
            "elements 16..65 of 64, allowed: whole columns inside",
        ),
        (
            message(&|k, _| _ = k.tile("v", TILE).operand(Major::Outer).summed(8..64)),
            "8..64 of 64 summed elements, allowed: multiples of 16 inside",
        ),
        (
            message(&|k, w| {
                let ring = k.tensor_ring_in_parts("s", 1, 64, 2);
                ring.publish(w, Which::Index(0), 2);
            }),
            "part 2 of a tile in 2 parts, allowed: smaller numbers",
        ),
        (message(&|k, _| _ = k.tensor_ring_in_parts("s", 1, 64, 0)), "a tile answered in 0 parts, allowed: 1 or more"),
    ] {
        assert!(got.contains(part), "{got}");
        assert!(got.contains(file!()), "{got}");
    }
}

//! Products into tensor memory of other elements than 16-bit floats, with and without scales: exact, and wrong in every way
//! that scales can be.

use crate::common::mutate::{change, drop, drop_waits_at, find, guarded, line, repeat, replace};
use crate::common::{Random, download, upload};
use crate::tcgen05::{Bug, check, check_seeds};
use fulgurite_core::format::{Grouped, ScaleLayout};
use fulgurite_kernels::gemm::GemmConfig;
use fulgurite_kernels::gemm::plan::Matrix;
use fulgurite_kernels::gemm::scaled::{CONFIG, ScaledFormat, ScaledGemm, ScaledMatrix, kernel};
use fulgurite_ptx::device::{Device, DeviceError, Stream, TensorSpan, Value};
use fulgurite_ptx::inst::Arg;
use fulgurite_ptx::{
    BuildError, Kernel, Major, Number, RowView, Sum, Target, TensorScales, Tile, TileShape, Warpgroups, Warps, Which,
    bf16, model, scale_tile,
};
use fulgurite_sim::{Fault, Finding, Line, Options, Sim, TensorOrder};
use std::sync::Arc;

fn target(name: &str) -> Target {
    Target::named(name).unwrap()
}

fn on(seed: u64, tensor: TensorOrder) -> Sim {
    let options = Options { seed, tensor, budget: 3_000_000, whole_scales: true, ..Options::default() };
    Sim::on(target("sm_100a"), options)
}

fn complain(sim: &Sim) -> String {
    sim.findings().iter().map(|f| format!("{f}\n")).collect()
}

/// Columns of B, and bytes of a row, in the products of one tile.
const COLS: u32 = 64;
const LINE: u32 = 256;

/// C = A B of one tile: A [128][k], B [64][k], C [128][64] of f32, or of i32 for bytes.
fn one_tile(target: Target, [a, b]: [Number; 2]) -> Result<Kernel, BuildError> {
    Kernel::build("one_tile", target, |k| {
        let shapes = [(a, 128), (b, COLS)].map(|(number, rows)| TileShape::new(number, rows, LINE / number.bytes()));
        let tensors = [k.tensor("a", shapes[0], 2), k.tensor("b", shapes[1], 2)];
        let bytes = matches!(a, Number::S8 | Number::U8);
        let (floats, integers) = (k.pointer::<f32>("c"), k.pointer::<i32>("c_integers"));
        let ring = k.pipe("operands", 1, &shapes);
        let (sums, which) = (k.tensor_ring("sums", 1, 1, COLS), Which::Index(0));
        k.role("store", Warpgroups(1), |w| {
            let (acc, first) = (sums.await_full(w, which), w.thread() * COLS);
            if bytes {
                let all = w.load_tensor_integers(acc.integers());
                (0..).zip(all).for_each(|(i, x)| integers.store(w, first + i, x));
            } else {
                let row = w.row_accumulators(COLS);
                w.load_tensor(&row, acc);
                w.wait_tensor_loads();
                (0..).zip(row.elements()).for_each(|(i, x)| floats.store(w, first + i, x));
            }
            sums.give_back(w, which);
        });
        k.role("load", Warps(1), |w| {
            w.one_thread(|t| {
                let zero = t.constant(0u32);
                ring.put(t, |t, stage| {
                    (0..2).for_each(|i| stage.load(t, stage.tile(i), &tensors[i], &[zero, zero]));
                });
            });
        });
        k.role("multiply", Warps(1), |w| {
            let acc = sums.await_empty(w, which);
            let tiles = ring.wait(w);
            let acc = if bytes { acc.integers() } else { acc };
            let [a, b] = [0, 1].map(|i: usize| tiles[i].operand(Major::Inner));
            w.elected(|t| t.multiply_tensor(acc, a, b, Sum::Fresh));
            ring.done_with_products(w);
            sums.filled(w, which);
        });
    })
}

/// Small whole numbers as elements.
fn elements(number: Number, count: u32, random: &mut Random) -> (Vec<u8>, Vec<f64>) {
    let mut bytes = Vec::new();
    let mut values = Vec::new();
    for _ in 0..count {
        let x = random.below(15) as i32 - if number == Number::U8 { 0 } else { 7 };
        match number {
            Number::Tf32 => bytes.extend((x as f32).to_bits().to_le_bytes()),
            Number::E4m3 | Number::E5m2 => bytes.push(model::to_fp8(x as f32, number)),
            _ => bytes.push(x as u8),
        }
        let last = bytes.len() - number.bytes() as usize;
        let mut word = [0; 4];
        word[..bytes.len() - last].copy_from_slice(&bytes[last..]);
        values.push(model::decode(u32::from_le_bytes(word), number));
    }
    (bytes, values)
}

#[test]
fn other_elements_are_exact() {
    use Number::{E4m3, E5m2, S8, Tf32, U8};
    for numbers in [[Tf32; 2], [E4m3; 2], [E5m2; 2], [E4m3, E5m2], [E5m2, E4m3], [S8; 2], [U8, S8]] {
        for tensor in [TensorOrder::Queue, TensorOrder::Strict] {
            let (sim, mut random) = (on(1, tensor), Random(7));
            let k = LINE / numbers[0].bytes();
            let (a_bytes, a) = elements(numbers[0], 128 * k, &mut random);
            let (b_bytes, b) = elements(numbers[1], COLS * k, &mut random);
            let (a_buffer, b_buffer) = (upload(&sim, &words(&a_bytes)), upload(&sim, &words(&b_bytes)));
            let c = upload(&sim, &vec![f32::NAN; (128 * COLS) as usize]);
            let tensor = |span, number: Number, rows: u32| {
                let extent = vec![(LINE / number.bytes()).into(), rows.into()];
                Value::Tensor(TensorSpan { span, number, extent, strides: vec![LINE.into()], ragged: None })
            };
            let args = [
                tensor(a_buffer.span(), numbers[0], 128),
                tensor(b_buffer.span(), numbers[1], COLS),
                Value::Pointer(c.span()),
                Value::Pointer(c.span()),
            ];
            let module = sim.load(Arc::new(one_tile(target("sm_100a"), numbers).unwrap())).unwrap();
            sim.launch(&module, [1, 1, 1], &args, Stream::default()).unwrap();
            sim.synchronize(Stream::default()).unwrap_or_else(|_| panic!("{numbers:?}: {}", complain(&sim)));
            let bits = download(&sim, &c);
            for (row, col) in (0..128u32).flat_map(|row| (0..COLS).map(move |col| (row, col))) {
                let want: f64 = (0..k).map(|i| a[(row * k + i) as usize] * b[(col * k + i) as usize]).sum();
                let at = 4 * (row * COLS + col) as usize;
                let word: [u8; 4] = bits[at..at + 4].try_into().unwrap();
                let got = match numbers[0] {
                    S8 | U8 => f64::from(i32::from_le_bytes(word)),
                    _ => f64::from(f32::from_le_bytes(word)),
                };
                assert_eq!(got, want, "{numbers:?}: c[{row}][{col}]");
            }
            let flops = sim.report().total().tensor_flops;
            assert_eq!(flops[numbers[0].name()], 2 * u64::from(128 * COLS * k));
        }
    }
    let refused = one_tile(target("sm_103a"), [Number::S8; 2]).unwrap_err().to_string();
    assert!(refused.contains("`tcgen05.mma.i8.ss` needs PTX 8.6 and sm_100a alone"), "{refused}");
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Numbers that the format holds exactly, with scales that differ from group to group.
fn exact(format: ScaledFormat, rows: u32, k: u32, random: &mut Random) -> Vec<f32> {
    let group = format.group().group();
    let mut all = Vec::new();
    for _ in 0..(rows * k) as usize / group {
        let scale = (random.below(4) as f32).exp2() / 2.0;
        for i in 0..group {
            let sign = if random.below(2) == 0 { scale } else { -scale };
            all.push(match format {
                ScaledFormat::Mxfp8 => sign * random.below(8) as f32,
                // The largest code of a group decides its scale.
                ScaledFormat::Nvfp4 if i == 0 => sign * 6.0,
                ScaledFormat::Nvfp4 => sign * model::from_fp4(random.below(8) as u8),
            });
        }
    }
    all
}

const SMALL: GemmConfig = GemmConfig { depth: 2, band: 4, ..CONFIG };
const PAIR: GemmConfig = GemmConfig { cluster: 2, ..SMALL };

/// Runs a product on numbers that make all sums exact: the bits of C, and what they should be.
fn run(
    sim: &Sim,
    kernel: Kernel,
    format: ScaledFormat,
    [m, n, k]: [u32; 3],
) -> Result<(Vec<u16>, Vec<u16>), DeviceError> {
    let config = if kernel.cluster == 1 { SMALL } else { PAIR };
    let mut random = Random(u64::from(m * 31 + n * 7 + k));
    let factor = |rows: u32, random: &mut Random| {
        let data = exact(format, rows, k, random);
        let grouped = Grouped::new(format.group(), &data, rows as usize, k as usize).unwrap();
        assert_eq!(grouped.decode(), data, "the numbers are not those of the format");
        let groups = k as usize / format.group().group();
        let scales = ScaleLayout::Tiles128x4.pack(grouped.scales(), rows as usize, groups);
        let buffers = [upload(sim, &words(grouped.codes())), upload(sim, &words(&scales))];
        let line = grouped.codes().len() as u64 / u64::from(rows);
        let codes = Matrix::packed(buffers[0].span(), rows.into(), line, 1);
        (ScaledMatrix { codes, scales: buffers[1].span() }, data, buffers)
    };
    let (a, a_data, _a) = factor(m, &mut random);
    let (b, b_data, _b) = factor(n, &mut random);
    let stride = n.next_multiple_of(8);
    let c_buffer = upload(sim, &vec![bf16::from_f32(f32::NAN); (m * stride) as usize]);
    let c = Matrix { row_stride: stride.into(), ..Matrix::packed(c_buffer.span(), m.into(), n.into(), 1) };
    let gemm = ScaledGemm { format, number: Number::Bf16, config };
    let launch = gemm.launch(Arc::new(kernel), [a, b], c, config.cluster).unwrap();
    let module = sim.load(launch.kernel)?;
    sim.launch(&module, launch.grid, &launch.args, Stream::default())?;
    sim.synchronize(Stream::default())?;
    let bits = download(sim, &c_buffer);
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
        let at = 2 * (row * stride + col) as usize;
        got.push(u16::from_le_bytes([bits[at], bits[at + 1]]));
        let [x, y] = [&a_data[(row * k) as usize..], &b_data[(col * k) as usize..]];
        let sum: f64 = (0..k as usize).map(|i| f64::from(x[i]) * f64::from(y[i])).sum();
        want.push(bf16::from_f64(sum).to_bits());
    }
    Ok((got, want))
}

const FORMATS: [ScaledFormat; 2] = [ScaledFormat::Mxfp8, ScaledFormat::Nvfp4];

fn scaled(format: ScaledFormat, config: GemmConfig) -> Kernel {
    kernel::<bf16>(target("sm_100a"), format, config).unwrap()
}

#[test]
fn scaled_products_are_exact() {
    for format in FORMATS {
        for (i, sizes) in [[128, 128, 256], [200, 77, 320], [1, 1, 32], [300, 136, 608]].into_iter().enumerate() {
            for (config, tensor) in [(SMALL, TensorOrder::Strict), (PAIR, TensorOrder::Queue)] {
                let sim = on(i as u64, tensor);
                let (got, want) = run(&sim, scaled(format, config), format, sizes)
                    .unwrap_or_else(|_| panic!("{format:?} {sizes:?} {config:?}: {}", complain(&sim)));
                let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
                assert_eq!(wrong, None, "{format:?} {sizes:?} {config:?}, column {}", sizes[1]);
            }
        }
    }
}

#[test]
fn scaled_products_are_clean_in_every_order() {
    for (format, config) in FORMATS.into_iter().flat_map(|format| [(format, SMALL), (format, PAIR)]) {
        for seed in 0..2 {
            let tensor = if seed % 2 == 0 { TensorOrder::Strict } else { TensorOrder::Queue };
            let sim = on(seed, tensor);
            let (got, want) = run(&sim, scaled(format, config), format, [config.cluster * 384, 64, 672])
                .unwrap_or_else(|_| panic!("{format:?} {config:?} {seed}: {}", complain(&sim)));
            assert!(got == want, "{format:?} {config:?} {seed}");
        }
    }
}

/// Index of the constant that is the `n`-th shape of a scaled product.
fn shape(kernel: &Kernel) -> usize {
    let Arg::Reg(reg) = find(kernel, "tcgen05.mma.scaled.ss", 0).args[3] else { panic!("a shape that is no register") };
    let (mut n, mut found) = (0, None);
    kernel.each_op(&mut |op| {
        if op.inst.name == "mov.b32" {
            if op.args[0] == Arg::Reg(reg) {
                found.get_or_insert(n);
            }
            n += 1;
        }
    });
    found.expect("a shape")
}

fn findings(kernel: Kernel, format: ScaledFormat, seed: u64, tensor: TensorOrder) -> Vec<Finding> {
    let sim = on(seed, tensor);
    // Three tiles of C of four stages each.
    let k = 16 * format.group().group() as u32 * if format == ScaledFormat::Nvfp4 { 4 } else { 1 };
    let sizes = [384 * kernel.cluster, 128, k];
    let ran = run(&sim, kernel, format, sizes);
    let found = sim.findings();
    assert!(ran.is_ok() || !found.is_empty(), "nothing ran: {:?}", ran.err());
    found
}

fn bug(name: &'static str, kernel: Kernel, fault: Fault, lines: &[Line]) -> Bug {
    Bug { name, kernel, fault, lines: lines.to_vec(), or: None }
}

#[test]
fn planted_bugs_of_scales() {
    for (format, config) in [(ScaledFormat::Mxfp8, SMALL), (ScaledFormat::Nvfp4, SMALL), (ScaledFormat::Mxfp8, PAIR)] {
        let k = || scaled(format, config);
        let at = |row: &str, n: usize| line(&k(), row, n);
        let (copy, product) = (at("tcgen05.cp.scales", 0), at("tcgen05.mma.scaled.ss", 0));
        let load = if config.cluster == 1 { "cp.async.bulk.tensor.load" } else { "cp.async.bulk.tensor.load.pair" };
        let fetch = at(load, 2);
        let wait = |n: usize| at("mbarrier.try_wait", n);
        let other_type = |x: u64| x ^ 1 << 23;
        let mut bugs = vec![
            bug("scales of A never copied", drop(k(), "tcgen05.cp.scales", 0), Fault::Uninitialised, &[product]),
            bug(
                "scales copied past the columns",
                change(k(), "tcgen05.cp.scales", 0, 0, |n| n + 512),
                Fault::OutOfBounds,
                &[copy],
            ),
            bug(
                "scales read where none were copied",
                change(k(), "tcgen05.mma.scaled.ss", 0, 5, |n| n + 128),
                Fault::Uninitialised,
                &[product],
            ),
            bug(
                "scales of the other type",
                change(k(), "mov.b32", shape(&k()), 1, other_type),
                Fault::Operand,
                &[product],
            ),
            bug("scales not waited for", drop_waits_at(k(), wait(3)), Fault::Race, &[fetch, copy]),
        ];
        if (format, config) == (ScaledFormat::Mxfp8, SMALL) {
            let row = "tcgen05.mma.scaled.ss";
            // The shapes of the four steps differ in the byte of a cell: bits 29 and 30 for A, 4 and 5 for B.
            bugs.push(bug(
                "scales of step 0 in every step",
                repeat(k(), row, 3),
                Fault::TensorMemory,
                &[product, copy],
            ));
            let wrong_byte = change(k(), "mov.b32", shape(&k()) + 1, 1, |x| x ^ 3 << 29);
            bugs.push(bug("scales of step 2 in step 1", wrong_byte, Fault::TensorMemory, &[product, copy]));
        }
        if format == ScaledFormat::Nvfp4 {
            let later = |x: u64| x | 1 << 4;
            bugs.push(bug(
                "scales from the second byte of a cell",
                change(k(), "mov.b32", shape(&k()), 1, later),
                Fault::Operand,
                &[product],
            ));
        }
        if config.cluster == 1 {
            bugs.push(bug(
                "stages given back before their scales are copied",
                replace(k(), "tcgen05.commit", 0, "mbarrier.arrive", 1),
                Fault::Race,
                &[fetch, copy],
            ));
        } else {
            let expect = at("mbarrier.arrive.expect_tx", 0);
            bugs.push(bug("scales missing in the peer", guarded(k(), load, 2), Fault::ByteCount, &[expect, wait(3)]));
        }
        // What all kernels have in common is planted in one of them.
        if (format, config) != (ScaledFormat::Mxfp8, SMALL) {
            bugs.drain(..5); // the ones above
        }
        check_seeds(&bugs, 2, |kernel, seed| findings(kernel, format, seed, TensorOrder::Queue));
        check_seeds(&bugs, 1, |kernel, seed| findings(kernel, format, seed, TensorOrder::Strict));
        for tensor in [TensorOrder::Queue, TensorOrder::Strict] {
            assert!(findings(k(), format, 0, tensor).is_empty());
        }
    }
}

/// How the scales of one tile come into tensor memory, and what is wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Scales {
    /// Threads write them to shared memory; the queue of products copies them.
    Copied,
    /// Threads store them to tensor memory.
    Stored,
    /// One of the four warps stores nothing.
    StoredByThree,
    /// Each warp stores what it likes.
    Different,
}

/// C = A B of one tile with MXFP8 factors of ones, and scales of 2 for A and of 4 for B that threads write.
fn written(scales: Scales) -> Kernel {
    Kernel::build("written", target("sm_100a"), |k| {
        let shapes = [128, COLS].map(|rows| TileShape::new(Number::E4m3, rows, 128));
        let tensors = [k.tensor("a", shapes[0], 2), k.tensor("b", shapes[1], 2)];
        let c = k.pointer::<f32>("c");
        let ring = k.pipe("operands", 1, &shapes);
        let written = k.pipe("scales", 1, &[scale_tile(128, 4), scale_tile(COLS, 4)]);
        let places = ["scales of A", "scales of B"].map(|name| k.tensor_scales(name, 1, 128, 4));
        let (sums, which) = (k.tensor_ring("sums", 1, 1, COLS), Which::Index(0));
        k.role("store", Warpgroups(1), |w| {
            let barrier = w.group_barrier();
            written.fill(w, &barrier, |w, tiles| {
                // 2^1 and 2^2, in every byte.
                let bytes = [0x8080_8080u32, 0x8181_8181];
                for (tile, word) in tiles.iter().zip(bytes) {
                    if scales == Scales::Copied {
                        fill(w, *tile, word);
                    }
                }
                if scales != Scales::Copied {
                    for (place, word) in places.into_iter().zip(bytes) {
                        let word = match scales {
                            Scales::Different => w.warp_in_role() + word,
                            _ => w.constant(word),
                        };
                        match scales {
                            Scales::StoredByThree => {
                                w.when(w.warp_in_role().lt(3), |w| w.store_tensor_scales(place, [word; 4]));
                            }
                            _ => w.store_tensor_scales(place, [word; 4]),
                        }
                    }
                    w.wait_tensor_stores();
                    w.fence_tensor_before();
                }
            });
            let (acc, row) = (sums.await_full(w, which), w.row_accumulators(COLS));
            w.load_tensor(&row, acc);
            w.wait_tensor_loads();
            let first = w.thread() * COLS;
            (0..).zip(row.elements()).for_each(|(i, x)| c.store(w, first + i, x));
            sums.give_back(w, which);
        });
        k.role("load", Warps(1), |w| {
            w.one_thread(|t| {
                let zero = t.constant(0u32);
                ring.put(t, |t, stage| {
                    (0..2).for_each(|i| stage.load(t, stage.tile(i), &tensors[i], &[zero, zero]));
                });
            });
        });
        k.role("multiply", Warps(1), |w| {
            let acc = sums.await_empty(w, which);
            let (tiles, blocks) = (ring.wait(w), written.wait(w));
            w.fence_tensor_after();
            let [a, b]: [(_, TensorScales<'_>); 2] = [0, 1].map(|i: usize| (tiles[i].operand(Major::Inner), places[i]));
            w.elected(|t| {
                if scales == Scales::Copied {
                    (0..2).for_each(|i| t.copy_scales(places[i], blocks[i]));
                }
                t.multiply_scaled(acc, a, b, Sum::Fresh);
            });
            ring.done_with_products(w);
            written.done_with_products(w);
            sums.filled(w, which);
        });
    })
    .unwrap()
}

/// Writes a word everywhere in a block of scales of 32 rows.
fn fill<'k>(w: &fulgurite_ptx::Scope<'k, fulgurite_ptx::Group>, tile: Tile<'k>, word: u32) {
    w.when(w.thread().lt(32), |w| {
        let word = w.constant(word);
        tile.write_unit(w, w.thread(), w.constant(0u32), [word; 4]);
    });
}

fn run_written(sim: &Sim, kernel: Kernel) -> Result<Vec<f32>, DeviceError> {
    let ones = vec![u32::from(model::to_fp8(1.0, Number::E4m3)) * 0x0101_0101; 128 * 32];
    let (a, b) = (upload(sim, &ones), upload(sim, &ones));
    let c = upload(sim, &vec![f32::NAN; (128 * COLS) as usize]);
    let tensor = |span, rows: u64| {
        let extent = vec![128, rows];
        Value::Tensor(TensorSpan { span, number: Number::E4m3, extent, strides: vec![128], ragged: None })
    };
    let args = [tensor(a.span(), 128), tensor(b.span(), COLS.into()), Value::Pointer(c.span())];
    let module = sim.load(Arc::new(kernel))?;
    sim.launch(&module, [1, 1, 1], &args, Stream::default())?;
    sim.synchronize(Stream::default())?;
    Ok(words(&download(sim, &c)).into_iter().map(f32::from_bits).collect())
}

#[test]
fn scales_that_threads_write() {
    for (scales, tensor) in [
        (Scales::Copied, TensorOrder::Queue),
        (Scales::Copied, TensorOrder::Strict),
        (Scales::Stored, TensorOrder::Queue),
        (Scales::Stored, TensorOrder::Strict),
    ] {
        let sim = on(3, tensor);
        let got = run_written(&sim, written(scales)).unwrap_or_else(|_| panic!("{scales:?}: {}", complain(&sim)));
        assert!(got.iter().all(|&x| x == 128.0 * 8.0), "{scales:?}: {}", got[0]);
    }
    let copied = || written(Scales::Copied);
    let at = |row: &str, n: usize| line(&copied(), row, n);
    let product = line(&written(Scales::Stored), "tcgen05.mma.scaled.ss", 0);
    let mut fences = 0;
    copied().each_op(&mut |op| fences += usize::from(op.inst.name == "fence.proxy.async"));
    let bugs = [
        bug(
            "a copy of scales that were written without a proxy fence",
            drop(copied(), "fence.proxy.async", fences - 1),
            Fault::ProxyRace,
            &[at("st.shared.b32", 0), at("tcgen05.cp.scales", 0)],
        ),
        bug("scales missing in one quarter", written(Scales::StoredByThree), Fault::Uninitialised, &[product]),
        bug("scales that differ between quarters", written(Scales::Different), Fault::TensorMemory, &[product]),
        bug("stores not waited for", drop(written(Scales::Stored), "tcgen05.wait.st", 0), Fault::Race, &[product]),
    ];
    check(&bugs, |kernel, seed| {
        let sim = on(seed, TensorOrder::Queue);
        let _ = run_written(&sim, kernel);
        sim.findings()
    });
}

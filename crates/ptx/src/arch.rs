//! GPU architectures as values: their limits and hardware features, and the targets that kernels are printed for.

use std::fmt;

/// The instructions that multiply matrices at full rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorUnit {
    /// `mma.sync` of a warp, operands and accumulators in registers.
    MmaSync,
    /// `wgmma` of a warpgroup, operands in shared memory, accumulators in registers.
    Wgmma,
    /// `tcgen05.mma` of one thread, accumulators in tensor memory.
    Tcgen05,
}

impl fmt::Display for TensorUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TensorUnit::MmaSync => "mma.sync",
            TensorUnit::Wgmma => "wgmma",
            TensorUnit::Tcgen05 => "tcgen05",
        })
    }
}

/// A GPU architecture: its name in PTX, its limits, and the hardware features that decide which kernel is used.
///
/// [`Arch::ALL`] holds the architectures that kernels are built for. A GPU that is not among them gets the limits of the
/// nearest older one and none of its architecture-specific instructions, by [`Arch::of`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arch {
    /// Compute capability times ten.
    pub sm: u32,
    /// Suffix of the PTX name: `a` if kernels use architecture-specific instructions, else empty.
    pub suffix: &'static str,
    /// The GPU whose SM count, cache and rates represent the architecture when no device is present.
    pub gpu: &'static str,
    /// The oldest PTX version that knows the name.
    pub ptx_floor: (u8, u8),
    /// Shared memory available to one CTA after opting in, in bytes.
    pub shared_per_cta: u32,
    /// Shared memory of an SM, in bytes. Each resident CTA takes 1 KB more than it requests.
    pub shared_per_sm: u32,
    /// 32-bit registers of an SM.
    pub registers: u32,
    /// Maximum number of resident warps on an SM.
    pub warps: u32,
    /// Named barriers of a CTA.
    pub named_barriers: u32,
    /// The instructions that multiply matrices at full rate.
    pub tensor: TensorUnit,
    /// Columns of tensor memory, each 128 lanes of 32 bits; 0 on architectures without tensor memory.
    pub tensor_columns: u32,
    /// CTAs of the largest portable cluster; 1 on architectures without clusters.
    pub cluster: u32,
    /// Whether TMA moves boxes of tensors.
    pub tma: bool,
    /// Whether warpgroups can hand registers to each other with `setmaxnreg`.
    pub setmaxnreg: bool,
    /// Whether one instruction operates on two f32 values.
    pub f32x2: bool,
    /// SMs of [`gpu`](Arch::gpu).
    pub sms: u32,
    /// Second-level cache of [`gpu`](Arch::gpu), in bytes.
    pub l2_bytes: u64,
}

/// Limits that all architectures since Ampere share.
const REGISTERS: u32 = 65536;
const BARRIERS: u32 = 16;
const KB: u32 = 1024;
const MB: u64 = 1 << 20;

impl Arch {
    /// Ampere data-centre GPUs: A100.
    pub const SM_80: Arch = Arch {
        sm: 80,
        suffix: "",
        gpu: "A100",
        ptx_floor: (7, 0),
        shared_per_cta: 163 * KB,
        shared_per_sm: 164 * KB,
        registers: REGISTERS,
        warps: 64,
        named_barriers: BARRIERS,
        tensor: TensorUnit::MmaSync,
        tensor_columns: 0,
        cluster: 1,
        tma: false,
        setmaxnreg: false,
        f32x2: false,
        sms: 108,
        l2_bytes: 40 * MB,
    };
    /// RTX A6000, A40, A10, GeForce 30.
    pub const SM_86: Arch = Arch {
        sm: 86,
        gpu: "RTX A6000",
        ptx_floor: (7, 1),
        shared_per_cta: 99 * KB,
        shared_per_sm: 100 * KB,
        warps: 48,
        sms: 84,
        l2_bytes: 6 * MB,
        ..Arch::SM_80
    };
    /// L40S, L4, GeForce 40.
    pub const SM_89: Arch = Arch { sm: 89, gpu: "L40S", ptx_floor: (7, 8), sms: 142, l2_bytes: 96 * MB, ..Arch::SM_86 };
    /// H100, H200, GH200.
    pub const SM_90A: Arch = Arch {
        sm: 90,
        suffix: "a",
        gpu: "H200",
        ptx_floor: (8, 0),
        shared_per_cta: 227 * KB,
        shared_per_sm: 228 * KB,
        tensor: TensorUnit::Wgmma,
        cluster: 8,
        tma: true,
        setmaxnreg: true,
        sms: 132,
        l2_bytes: 50 * MB,
        ..Arch::SM_80
    };
    /// B200, GB200.
    pub const SM_100A: Arch = Arch {
        sm: 100,
        gpu: "B200",
        ptx_floor: (8, 6),
        tensor: TensorUnit::Tcgen05,
        tensor_columns: 512,
        f32x2: true,
        sms: 148,
        l2_bytes: 126 * MB,
        ..Arch::SM_90A
    };
    /// B300, GB300.
    pub const SM_103A: Arch = Arch { sm: 103, gpu: "B300", ptx_floor: (8, 8), ..Arch::SM_100A };
    /// RTX PRO 6000 Blackwell, GeForce 50.
    pub const SM_120A: Arch = Arch {
        sm: 120,
        gpu: "RTX 5090",
        ptx_floor: (8, 7),
        shared_per_cta: 99 * KB,
        shared_per_sm: 100 * KB,
        warps: 48,
        tensor: TensorUnit::MmaSync,
        tensor_columns: 0,
        sms: 170,
        l2_bytes: 96 * MB,
        ..Arch::SM_100A
    };
    /// GB10 of DGX Spark.
    pub const SM_121A: Arch =
        Arch { sm: 121, gpu: "GB10", ptx_floor: (8, 8), sms: 48, l2_bytes: 24 * MB, ..Arch::SM_120A };

    /// Every architecture that kernels are built for, oldest first.
    pub const ALL: [Arch; 8] = [
        Arch::SM_80,
        Arch::SM_86,
        Arch::SM_89,
        Arch::SM_90A,
        Arch::SM_100A,
        Arch::SM_103A,
        Arch::SM_120A,
        Arch::SM_121A,
    ];

    /// The architecture with this name, such as `sm_90a`.
    pub fn named(name: &str) -> Option<Arch> {
        Arch::ALL.into_iter().find(|arch| arch.name() == name)
    }

    /// The architecture of a compute capability. A capability that is not in [`Arch::ALL`] gets the limits of the
    /// nearest older entry and only portable instructions: no suffix, no `wgmma`, no tensor memory.
    pub fn of(major: u32, minor: u32) -> Arch {
        let sm = 10 * major + minor;
        let nearest = Arch::ALL.into_iter().rev().find(|arch| arch.sm <= sm).unwrap_or(Arch::SM_80);
        if nearest.sm == sm {
            return nearest;
        }
        let (tensor, tensor_columns, setmaxnreg, f32x2) = (TensorUnit::MmaSync, 0, false, false);
        // Chips of one family differ in shared memory; every one has at least this much.
        let (shared_per_cta, shared_per_sm) =
            (nearest.shared_per_cta.min(99 * KB), nearest.shared_per_sm.min(100 * KB));
        Arch { sm, suffix: "", tensor, tensor_columns, setmaxnreg, f32x2, shared_per_cta, shared_per_sm, ..nearest }
    }

    /// Its name in PTX.
    pub fn name(&self) -> String {
        format!("sm_{}{}", self.sm, self.suffix)
    }

    /// The names of [`Arch::ALL`], for messages.
    pub fn names() -> String {
        Arch::ALL.map(|arch| arch.name()).join(", ")
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// The target of printed PTX: an architecture, and the newest PTX version that its driver reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    /// Architecture whose instructions and limits apply.
    pub arch: Arch,
    /// Newest PTX version that the driver reads.
    pub ptx: (u8, u8),
}

impl Target {
    /// H100 and H200 with a CUDA 13 driver.
    pub const HOPPER: Target = Target { arch: Arch::SM_90A, ptx: (9, 0) };
    /// A100 with a CUDA 13 driver.
    pub const AMPERE: Target = Target { arch: Arch::SM_80, ptx: (9, 0) };

    /// The target of an architecture with a CUDA 13 driver.
    pub const fn new(arch: Arch) -> Target {
        Target { arch, ptx: (9, 0) }
    }

    /// The target of a GPU, from its compute capability and the newest CUDA version its driver knows.
    pub fn of(capability: (u32, u32), cuda: (u32, u32)) -> Target {
        // Versions are from the release notes of the PTX ISA. CUDA 12.6 brought no new version.
        let ptx = match cuda {
            (0..=10, _) => (7, 0),
            (11, minor) => (7, minor.min(8) as u8),
            (12, minor @ 0..=5) => (8, minor as u8),
            (12, minor) => (8, minor.min(9) as u8 - 1),
            (13, minor) => (9, minor.min(4) as u8),
            _ => (9, 4),
        };
        Target { arch: Arch::of(capability.0, capability.1), ptx }
    }

    /// The target with this name, such as `sm_90a`, with a CUDA 13 driver.
    pub fn named(name: &str) -> Option<Target> {
        Arch::named(name).map(Target::new)
    }

    /// Its name in PTX.
    pub fn name(self) -> String {
        self.arch.name()
    }

    /// Whether a GPU can run code printed for this target. Code for a name with a suffix runs on that architecture
    /// alone; other code runs on every later one. This does not check whether the driver reads the PTX version.
    pub fn runs_on(self, arch: &Arch) -> bool {
        self.arch.sm == arch.sm || self.arch.suffix.is_empty() && self.arch.sm < arch.sm
    }

    /// Compute capability times ten.
    pub const fn sm(self) -> u32 {
        self.arch.sm
    }

    /// Shared memory available to one CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.arch.shared_per_cta
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tables of the CUDA C++ Programming Guide (compute capabilities: technical specifications) and the PTX ISA
    /// (release notes): name, PTX version, shared memory of a CTA and of an SM, resident warps.
    #[test]
    fn the_numbers_are_those_of_the_manuals() {
        let want = [
            ("sm_80", (7, 0), 166_912, 167_936, 64),
            ("sm_86", (7, 1), 101_376, 102_400, 48),
            ("sm_89", (7, 8), 101_376, 102_400, 48),
            ("sm_90a", (8, 0), 232_448, 233_472, 64),
            ("sm_100a", (8, 6), 232_448, 233_472, 64),
            ("sm_103a", (8, 8), 232_448, 233_472, 64),
            ("sm_120a", (8, 7), 101_376, 102_400, 48),
            ("sm_121a", (8, 8), 101_376, 102_400, 48),
        ];
        for (name, ptx, cta, sm, warps) in want {
            let arch = Arch::named(name).unwrap();
            assert_eq!(arch.name(), name);
            assert_eq!((arch.ptx_floor, arch.shared_per_cta, arch.shared_per_sm, arch.warps), (ptx, cta, sm, warps));
            assert_eq!((arch.registers, arch.named_barriers), (65536, 16), "{name}");
            assert_eq!(Target::named(name).unwrap().shared_bytes(), cta);
        }
        assert_eq!(want.len(), Arch::ALL.len());
    }

    #[test]
    fn each_machine_has_its_own_tensor_unit() {
        let with = |unit: TensorUnit| Arch::ALL.into_iter().filter(move |a| a.tensor == unit).map(|a| a.sm);
        assert_eq!(with(TensorUnit::MmaSync).collect::<Vec<_>>(), [80, 86, 89, 120, 121]);
        assert_eq!(with(TensorUnit::Wgmma).collect::<Vec<_>>(), [90]);
        assert_eq!(with(TensorUnit::Tcgen05).collect::<Vec<_>>(), [100, 103]);
        for arch in Arch::ALL {
            assert_eq!(arch.tensor_columns > 0, arch.tensor == TensorUnit::Tcgen05, "{arch}");
            let since_hopper = arch.sm >= 90;
            assert_eq!((arch.tma, arch.setmaxnreg, arch.cluster > 1), (since_hopper, since_hopper, since_hopper));
            assert_eq!((arch.suffix == "a", arch.f32x2), (since_hopper, arch.sm >= 100), "{arch}");
        }
    }

    #[test]
    fn a_device_names_its_target() {
        let target = |capability, cuda| {
            let Target { arch, ptx } = Target::of(capability, cuda);
            (arch.name(), ptx)
        };
        assert_eq!(target((9, 0), (12, 4)), ("sm_90a".into(), (8, 4)));
        assert_eq!(target((8, 6), (11, 8)), ("sm_86".into(), (7, 8)));
        assert_eq!(target((10, 0), (12, 6)), ("sm_100a".into(), (8, 5)));
        assert_eq!(target((12, 0), (12, 8)), ("sm_120a".into(), (8, 7)));
        assert_eq!(target((10, 3), (12, 9)), ("sm_103a".into(), (8, 8)));
        assert_eq!(target((12, 1), (13, 2)), ("sm_121a".into(), (9, 2)));
        // An architecture outside the table gets no features of its own and no more shared memory than any chip of its
        // family.
        let thor = Arch::of(11, 0);
        assert_eq!((thor.name().as_str(), thor.tensor, thor.tensor_columns), ("sm_110", TensorUnit::MmaSync, 0));
        assert_eq!((thor.shared_per_cta, thor.setmaxnreg), (101_376, false));
        assert_eq!(Arch::of(7, 5).name(), "sm_75");
    }

    #[test]
    fn what_runs_where() {
        let runs = |own: Arch, on: Arch| Target::new(own).runs_on(&on);
        assert!(runs(Arch::SM_80, Arch::SM_80) && runs(Arch::SM_80, Arch::SM_120A) && runs(Arch::SM_90A, Arch::SM_90A));
        assert!(!runs(Arch::SM_90A, Arch::SM_100A) && !runs(Arch::SM_100A, Arch::SM_103A));
        assert!(!runs(Arch::SM_89, Arch::SM_86));
    }

    #[test]
    fn names_that_are_none_are_refused() {
        for name in ["sm_90", "sm_100", "sm_80a", "sm_121", "90a", ""] {
            assert_eq!(Target::named(name), None, "{name}");
        }
    }
}

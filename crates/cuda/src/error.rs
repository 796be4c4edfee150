//! Errors of opening a GPU.

use fulgurite_ptx::device::DeviceError;
use thiserror::Error;

/// The oldest CUDA version whose driver has all functions that are called: tensor maps came with 12.0.
pub(crate) const OLDEST_CUDA: (u32, u32) = (12, 0);
/// The oldest compute capability for which kernels are printed: Ampere's.
pub(crate) const OLDEST_CAPABILITY: (u32, u32) = (8, 0);

/// The reason why a GPU cannot be used. [`Cuda::open`](crate::Cuda::open) returns it as [`DeviceError::Absent`].
///
/// ```
/// use fulgurite_cuda::Unusable;
///
/// let why = Unusable::Ordinal { ordinal: 2, count: 1 };
/// assert_eq!(why.to_string(), "GPU 2 was asked for, there are 1; count from 0, or check CUDA_VISIBLE_DEVICES");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unusable {
    /// The driver's library is not on this machine.
    #[error("the NVIDIA driver's library (libcuda) was not found; install the driver")]
    NoDriver,
    /// The library lacks a function that is called.
    #[error("the NVIDIA driver's library (libcuda) lacks `{entry}`; update the driver to CUDA {}.{} or newer", OLDEST_CUDA.0, OLDEST_CUDA.1)]
    NoEntry {
        /// Name of the missing function.
        entry: &'static str,
    },
    /// The library exists but cannot be initialised.
    #[error("the NVIDIA driver does not start: {what}; check that the GPU is visible to this process (`nvidia-smi`)")]
    NoStart {
        /// The driver's message.
        what: String,
    },
    /// No GPU has this index.
    #[error("GPU {ordinal} was asked for, there are {count}; count from 0, or check CUDA_VISIBLE_DEVICES")]
    Ordinal {
        /// Requested index.
        ordinal: u32,
        /// Number of GPUs.
        count: u32,
    },
    /// The driver is too old.
    #[error("the NVIDIA driver knows CUDA up to {}.{}, needed: {}.{} or newer; update the driver", got.0, got.1, OLDEST_CUDA.0, OLDEST_CUDA.1)]
    OldDriver {
        /// The newest CUDA version that the driver supports.
        got: (u32, u32),
    },
    /// The GPU is too old.
    #[error("{name} has compute capability {}.{}, needed: {}.{} or newer; use another GPU, or the cpu engine", got.0, got.1, OLDEST_CAPABILITY.0, OLDEST_CAPABILITY.1)]
    OldGpu {
        /// Name of the GPU.
        name: String,
        /// Compute capability of the GPU.
        got: (u32, u32),
    },
}

impl From<Unusable> for DeviceError {
    fn from(why: Unusable) -> Self {
        DeviceError::Absent(why.to_string())
    }
}

/// Checks that a driver and a GPU are new enough.
pub(crate) fn check_age(name: &str, capability: (u32, u32), cuda: (u32, u32)) -> Result<(), Unusable> {
    if cuda < OLDEST_CUDA {
        return Err(Unusable::OldDriver { got: cuda });
    }
    if capability < OLDEST_CAPABILITY {
        return Err(Unusable::OldGpu { name: name.into(), got: capability });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_say_what_is_needed() {
        let absent = |why: Unusable| DeviceError::from(why).to_string();
        let cases = [
            (
                absent(Unusable::NoDriver),
                "no device: the NVIDIA driver's library (libcuda) was not found; install the driver",
            ),
            (
                absent(Unusable::NoEntry { entry: "cuLaunchKernelEx" }),
                "no device: the NVIDIA driver's library (libcuda) lacks `cuLaunchKernelEx`; update the driver to CUDA 12.0 or newer",
            ),
            (
                absent(Unusable::NoStart { what: "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected".into() }),
                "no device: the NVIDIA driver does not start: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected; \
                 check that the GPU is visible to this process (`nvidia-smi`)",
            ),
            (
                absent(Unusable::Ordinal { ordinal: 3, count: 2 }),
                "no device: GPU 3 was asked for, there are 2; count from 0, or check CUDA_VISIBLE_DEVICES",
            ),
        ];
        for (got, want) in cases {
            assert_eq!(got, want);
        }
    }

    #[test]
    fn age_is_checked() {
        assert_eq!(check_age("GPU", (9, 0), (13, 0)), Ok(()));
        assert_eq!(check_age("GPU", (8, 0), (12, 0)), Ok(()));
        assert_eq!(
            check_age("Tesla V100", (7, 0), (12, 4)).unwrap_err().to_string(),
            "Tesla V100 has compute capability 7.0, needed: 8.0 or newer; use another GPU, or the cpu engine"
        );
        assert_eq!(
            check_age("Tesla V100", (7, 0), (11, 8)).unwrap_err().to_string(),
            "the NVIDIA driver knows CUDA up to 11.8, needed: 12.0 or newer; update the driver"
        );
    }
}

//! The GPU kernels of fulgurite: functions that build kernel values, and the launches that run them.

#![forbid(unsafe_code)]

pub mod add;
pub mod attention;
pub mod configs;
pub mod gemm;
pub mod no_kernel;
pub mod operator;
pub mod params;
pub mod parts;
pub mod probe;
pub mod registry;
pub mod row_dot;
pub mod softmax;
pub mod tensor_operator;
pub mod tensor_type;

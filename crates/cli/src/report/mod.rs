//! Pictures and pages.

pub mod html;
pub mod svg;

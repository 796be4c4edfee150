//! Pictures and pages.

pub mod html;
pub mod page;
pub mod svg;

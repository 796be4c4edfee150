//! What the types of the kernel language forbid, with the messages that a reader gets.
//!
//! The messages are those of the compiler that wrote them; `TRYBUILD=overwrite cargo test -p fulgurite-ptx --test ui`
//! writes them anew.

#[test]
fn wrong_kernels_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}

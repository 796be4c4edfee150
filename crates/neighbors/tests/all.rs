//! Tests of the neighbours' functions, one program: a program for each file would link every crate below once more.

mod density;
mod kmeans;
mod knn;
mod memory;
mod streams;
mod svd;

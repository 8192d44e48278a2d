//! The backend against the real library. Without ONNX Runtime these tests fail and say how to get it.

#[cfg(test)]
mod failures;
#[cfg(test)]
mod harness;
#[cfg(test)]
mod onnx_models;
#[cfg(test)]
mod ragged;
#[cfg(test)]
mod runs;
#[cfg(test)]
mod shapes;

//! The program as people start it: its exit codes, what it prints, how it serves and how it stops.
//!
//! Only backends without a model file are used, so nothing but the binary is needed. Servers listen on ports of
//! 127.0.0.1 that the system chooses and are ended by their process id.

#[cfg(test)]
mod logs;
#[cfg(test)]
mod program;
#[cfg(test)]
mod repository;
#[cfg(test)]
mod serving;
#[cfg(test)]
mod starting;
#[cfg(test)]
mod stopping;
#[cfg(test)]
mod tools;

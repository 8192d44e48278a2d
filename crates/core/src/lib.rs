//! trireme-core

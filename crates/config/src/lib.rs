//! trireme-config

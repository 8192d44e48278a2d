//! trireme-proto

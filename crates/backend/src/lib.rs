//! trireme-backend

//! trireme-backend-testing

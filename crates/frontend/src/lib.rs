//! trireme-frontend

//! Requests that models make for other models, answered without a network.

use std::fmt;
use std::sync::{Arc, Weak};

use trireme_backend::ModelCaller;
use trireme_types::{Error, InferRequest, Responder};

use crate::table::ModelTable;

/// Calls the models of one server. It does not keep them alive, since they keep it.
pub(crate) struct TableCaller(Weak<ModelTable>);

impl TableCaller {
    pub(crate) fn new(table: &Arc<ModelTable>) -> Self {
        Self(Arc::downgrade(table))
    }
}

impl fmt::Debug for TableCaller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TableCaller")
    }
}

impl ModelCaller for TableCaller {
    fn infer(&self, model: &str, version: Option<i64>, request: InferRequest, responder: Responder) {
        let Some(table) = self.0.upgrade() else {
            responder.finish(Err(Error::unavailable("Server exiting")));
            return;
        };
        let hold = match table.hold(model, version) {
            Ok(hold) => hold,
            Err(error) => {
                responder.finish(Err(error));
                return;
            }
        };
        let inside = hold.model().models_inside();
        let again = request.callers.iter().find(|caller| ***caller == *model || inside.contains(*caller));
        if let Some(again) = again {
            let way: Vec<&str> = request.callers.iter().map(|caller| &**caller).chain([model]).collect();
            let error = Error::invalid_arg(format!(
                "circular call between models: {}; model '{again}' would wait for itself",
                way.join(" -> ")
            ));
            responder.finish(Err(error));
            return;
        }
        hold.model().infer(request, responder);
    }

    fn is_ready(&self, model: &str, version: Option<i64>) -> bool {
        let found = self.0.upgrade().and_then(|table| table.find(model, version).ok());
        found.is_some_and(|model| model.is_ready())
    }
}

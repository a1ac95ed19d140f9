//! How many choices one connection and one tenant may have running at the same time.
//!
//! A choice is one answer to one prompt, so a request has as many as its prompts times `n`. A connection that asks for many choices and
//! does not read them, or a tenant with many connections, is refused more before it fills the engines' queues. Not here: how the
//! engines share their time among tenants (the router), and what becomes of a choice that is not read (the engine).

use crate::error::Error;
use crate::settings::Settings;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A client that is over its limit knows itself when a choice of its own ends; a second spares it from asking in a loop.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Choices that run, by whose they are.
#[derive(Clone)]
pub(crate) struct Choices {
    per_connection: usize,
    per_tenant: usize,
    tenants: Arc<Mutex<HashMap<Arc<str>, usize>>>,
}

/// The choices that run on one connection. Every request has that of its connection among its extensions.
#[derive(Clone, Default)]
pub(crate) struct OfConnection(Arc<Mutex<usize>>);

/// Counts the choices of a request until it is dropped.
#[must_use = "dropping it ends the count"]
pub(crate) struct Running {
    count: usize,
    connection: Option<OfConnection>,
    tenant: Option<(Arc<str>, Choices)>,
}

impl Choices {
    pub(crate) fn new(settings: &Settings) -> Self {
        let Settings { max_choices_per_connection, max_choices_per_tenant, .. } = *settings;
        Self { per_connection: max_choices_per_connection, per_tenant: max_choices_per_tenant, tenants: Arc::default() }
    }

    /// Counts `count` choices of a request, or refuses it. Requests without a tenant are only counted by connection.
    pub(crate) fn start(
        &self,
        count: usize,
        connection: Option<&OfConnection>,
        tenant: &Arc<str>,
    ) -> Result<Running, Error> {
        let mut running = Running { count, connection: None, tenant: None };
        if let Some(connection) = connection {
            let mut held = connection.0.lock().unwrap_or_else(PoisonError::into_inner);
            add(&mut held, count, self.per_connection, "connection")?;
            running.connection = Some(connection.clone());
        }
        if !tenant.is_empty() {
            let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
            let held = tenants.get(tenant).copied().unwrap_or_default();
            let mut sum = held;
            // On refusal `running` takes back what the connection was charged.
            add(&mut sum, count, self.per_tenant, "tenant")?;
            tenants.insert(tenant.clone(), sum);
            running.tenant = Some((tenant.clone(), self.clone()));
        }
        Ok(running)
    }
}

fn add(held: &mut usize, count: usize, most: usize, of: &str) -> Result<(), Error> {
    if count > most {
        let message =
            format!("Invalid 'n': the request has {count} choices, but a {of} may have {most} at the same time.");
        return Err(Error::invalid("n", "integer_above_max_value", message));
    }
    if *held + count > most {
        return Err(Error::Overloaded(RETRY_AFTER));
    }
    *held += count;
    Ok(())
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(connection) = &self.connection {
            *connection.0.lock().unwrap_or_else(PoisonError::into_inner) -= self.count;
        }
        if let Some((tenant, choices)) = &self.tenant {
            let mut tenants = choices.tenants.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(held) = tenants.get_mut(tenant) {
                *held -= self.count;
                if *held == 0 {
                    tenants.remove(tenant);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices() -> Choices {
        Choices::new(&Settings { max_choices_per_connection: 10, max_choices_per_tenant: 15, ..Settings::default() })
    }

    fn overloaded(refused: &Result<Running, Error>) -> bool {
        matches!(refused, Err(Error::Overloaded(_)))
    }

    #[test]
    fn a_connection_gets_no_more_choices_than_its_limit() {
        let (choices, one, other) = (choices(), OfConnection::default(), OfConnection::default());
        let nobody = "".into();
        let running = choices.start(6, Some(&one), &nobody).unwrap();
        assert!(overloaded(&choices.start(5, Some(&one), &nobody)));
        let _fits = choices.start(4, Some(&one), &nobody).unwrap();
        let _another = choices.start(10, Some(&other), &nobody).unwrap();
        drop(running);
        assert!(choices.start(6, Some(&one), &nobody).is_ok());
        assert!(matches!(choices.start(11, Some(&one), &nobody), Err(Error::Invalid { .. })), "never possible");
    }

    #[test]
    fn a_tenant_gets_no_more_choices_than_its_limit() {
        let (choices, one, other) = (choices(), OfConnection::default(), OfConnection::default());
        let (ann, bob) = ("ann".into(), "bob".into());
        let running = choices.start(10, Some(&one), &ann).unwrap();
        assert!(overloaded(&choices.start(6, Some(&other), &ann)));
        assert_eq!(*other.0.lock().unwrap(), 0, "a refused request is not counted on its connection");
        let _bobs = choices.start(10, Some(&other), &bob).unwrap();
        drop(running);
        assert_eq!(choices.tenants.lock().unwrap().len(), 1, "a tenant without choices is not kept");
    }
}

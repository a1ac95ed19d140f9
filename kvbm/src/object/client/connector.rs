//! HTTP to an object store, whose responses must not be web pages.
//!
//! A captive portal, and a web server at the port that was meant for the store, answer any request with HTML and a
//! status of success. As XML, such a page is an empty list. So it is an error of the request.

use futures::future::BoxFuture;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, Result};

/// Networks of metadata services of machines, which are no stores. They start with this.
const LINK_LOCAL: &str = "169.254.";

/// Makes clients that refuse web pages.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        Ok(HttpClient::new(NoPages(ReqwestConnector::default().connect(options)?)))
    }
}

#[derive(Debug)]
struct NoPages(HttpClient);

impl HttpService for NoPages {
    fn call<'a, 'future>(&'a self, request: HttpRequest) -> BoxFuture<'future, Result<HttpResponse, HttpError>>
    where
        'a: 'future,
        Self: 'future,
    {
        Box::pin(async move {
            let is_of_store = !request.uri().host().is_some_and(|host| host.starts_with(LINK_LOCAL));
            let response = self.0.execute(request).await?;
            if is_of_store && response.status().is_success() && is_page(&response) {
                return Err(HttpError::new(HttpErrorKind::Decode, WebPage));
            }
            Ok(response)
        })
    }
}

/// Neither a list nor a block has this type.
fn is_page(response: &HttpResponse) -> bool {
    let media_type = response.headers().get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = media_type.split(';').next().unwrap_or_default().trim();
    ["text/html", "application/xhtml+xml"].iter().any(|page| media_type.eq_ignore_ascii_case(page))
}

/// A web page came instead of the answer of a store.
#[derive(Debug, thiserror::Error)]
#[error(
    "the server answered with a page of HTML, so it is no object store: check the endpoint, its port, and whether the \
     network asks for a login"
)]
struct WebPage;

// Compiles if our declarations of OpenSSL's functions and constants match the real headers.
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <cstdio>

#include "declarations.h"
#include "transport/sockets/openssl.h"

namespace {

using declarations::same_calls;

constexpr sirtaki::OpensslFunctions functions;

#define COMPARE(member, symbol, result, parameters) \
  static_assert(same_calls(functions.member, decltype (&::symbol)()), #symbol " is declared differently");
SIRTAKI_OPENSSL_FUNCTIONS(COMPARE)

static_assert(sirtaki::tls_1_3 == TLS1_3_VERSION);
static_assert(sirtaki::ssl_error_want_read == SSL_ERROR_WANT_READ);
static_assert(sirtaki::ssl_ctrl_session_cache_mode == SSL_CTRL_SET_SESS_CACHE_MODE && SSL_SESS_CACHE_OFF == 0);
static_assert(sirtaki::ssl_ctrl_least_version == SSL_CTRL_SET_MIN_PROTO_VERSION);
static_assert(sirtaki::ssl_ctrl_greatest_version == SSL_CTRL_SET_MAX_PROTO_VERSION);
static_assert(sirtaki::ssl_verify_peer == SSL_VERIFY_PEER);
static_assert(sirtaki::ssl_verify_demand == SSL_VERIFY_FAIL_IF_NO_PEER_CERT);
static_assert(sirtaki::ssl_no_ticket == SSL_OP_NO_TICKET);
static_assert(sirtaki::ssl_key_update_one_way == SSL_KEY_UPDATE_NOT_REQUESTED);
static_assert(sirtaki::evp_elliptic_curve == EVP_PKEY_EC && sirtaki::asn1_ascii == MBSTRING_ASC);
static_assert(sirtaki::x509_version_3 == 2);  // X509_VERSION_3, which has no name in 1.1.1

}  // namespace

// Prints the version of the headers.
int main() { std::printf("%s\n", OPENSSL_VERSION_TEXT); }

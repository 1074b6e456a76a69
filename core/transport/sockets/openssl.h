// The part of OpenSSL's API that is used, declared here so that nothing of OpenSSL is needed to build. Names and
// meanings are those of OpenSSL's manual (https://docs.openssl.org); all of it is in versions 1.1.1 and 3.
// tests/security/openssl_header compares them with the real headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sirtaki {

using SslContext = struct SslContextTag*;
using Ssl = struct SslTag*;
using SslBio = struct SslBioTag*;
using X509Certificate = struct X509CertificateTag*;
using X509StoreContext = struct X509StoreContextTag*;
using X509Name = struct X509NameTag*;
using EvpKey = struct EvpKeyTag*;
using EvpKeyContext = struct EvpKeyContextTag*;
using EvpDigest = const struct EvpDigestTag*;
using Asn1String = struct Asn1StringTag*;  // also times and integers
using SslMethod = const struct SslMethodTag*;
using SslVerify = int (*)(X509StoreContext, void*);

constexpr int tls_1_3 = 0x0304;
constexpr int ssl_error_want_read = 2;
constexpr int ssl_ctrl_session_cache_mode = 44, ssl_ctrl_least_version = 123, ssl_ctrl_greatest_version = 124;
constexpr int ssl_verify_peer = 1, ssl_verify_demand = 2;
constexpr uint64_t ssl_no_ticket = 0x4000;
constexpr int ssl_key_update_one_way = 0;
constexpr int evp_elliptic_curve = 408, asn1_ascii = 0x1001;
constexpr long x509_version_3 = 2;

// X(member, symbol, result, parameters)
#define SIRTAKI_OPENSSL_FUNCTIONS(X)                                                                          \
  X(method, TLS_method, SslMethod, ())                                                                        \
  X(new_context, SSL_CTX_new, SslContext, (SslMethod))                                                        \
  X(free_context, SSL_CTX_free, void, (SslContext))                                                           \
  X(control, SSL_CTX_ctrl, long, (SslContext, int command, long, void*))                                      \
  X(set_options, SSL_CTX_set_options, uint64_t, (SslContext, uint64_t))                                       \
  X(set_ciphersuites, SSL_CTX_set_ciphersuites, int, (SslContext, const char*))                               \
  X(set_tickets, SSL_CTX_set_num_tickets, int, (SslContext, size_t))                                          \
  X(use_certificate, SSL_CTX_use_certificate, int, (SslContext, X509Certificate))                             \
  X(use_key, SSL_CTX_use_PrivateKey, int, (SslContext, EvpKey))                                               \
  X(set_verify_mode, SSL_CTX_set_verify, void, (SslContext, int mode, int (*)(int, X509StoreContext)))        \
  X(set_verify, SSL_CTX_set_cert_verify_callback, void, (SslContext, SslVerify, void* argument))              \
  X(verified_index, SSL_get_ex_data_X509_STORE_CTX_idx, int, ())                                              \
  X(verified, X509_STORE_CTX_get_ex_data, void*, (X509StoreContext, int index))                               \
  X(shown_certificate, X509_STORE_CTX_get0_cert, X509Certificate, (X509StoreContext))                         \
  X(new_session, SSL_new, Ssl, (SslContext))                                                                  \
  X(free_session, SSL_free, void, (Ssl))                                                                      \
  X(set_data, SSL_set_ex_data, int, (Ssl, int index, void*))                                                  \
  X(data, SSL_get_ex_data, void*, (const struct SslTag*, int index))                                          \
  X(set_bio, SSL_set_bio, void, (Ssl, SslBio in, SslBio out))                                                 \
  X(accepts, SSL_set_accept_state, void, (Ssl))                                                               \
  X(connects, SSL_set_connect_state, void, (Ssl))                                                             \
  X(handshake, SSL_do_handshake, int, (Ssl))                                                                  \
  X(read, SSL_read, int, (Ssl, void*, int bytes))                                                             \
  X(write, SSL_write, int, (Ssl, const void*, int bytes))                                                     \
  X(pending, SSL_pending, int, (const struct SslTag*))                                                        \
  X(update_key, SSL_key_update, int, (Ssl, int kind))                                                         \
  X(close_notify, SSL_shutdown, int, (Ssl))                                                                   \
  X(error, SSL_get_error, int, (const struct SslTag*, int result))                                            \
  X(make_bio_pair, BIO_new_bio_pair, int, (SslBio*, size_t own_bytes, SslBio*, size_t others_bytes))          \
  X(free_bio, BIO_free, int, (SslBio))                                                                        \
  X(bio_pending, BIO_ctrl_pending, size_t, (SslBio))                                                          \
  X(bio_wants, BIO_ctrl_get_read_request, size_t, (SslBio))                                                   \
  X(look_at_bio, BIO_nread0, int, (SslBio, char** from))                                                      \
  X(take_from_bio, BIO_nread, int, (SslBio, char** from, int bytes))                                          \
  X(room_in_bio, BIO_nwrite0, int, (SslBio, char** to))                                                       \
  X(give_to_bio, BIO_nwrite, int, (SslBio, char** to, int bytes))                                             \
  X(new_key_context, EVP_PKEY_CTX_new_id, EvpKeyContext, (int kind, struct SslEngineTag*))                    \
  X(begin_key, EVP_PKEY_keygen_init, int, (EvpKeyContext))                                                    \
  X(set_key, EVP_PKEY_CTX_ctrl_str, int, (EvpKeyContext, const char* name, const char* value))                \
  X(make_key, EVP_PKEY_keygen, int, (EvpKeyContext, EvpKey*))                                                 \
  X(free_key_context, EVP_PKEY_CTX_free, void, (EvpKeyContext))                                               \
  X(free_key, EVP_PKEY_free, void, (EvpKey))                                                                  \
  X(sha256, EVP_sha256, EvpDigest, ())                                                                        \
  X(new_certificate, X509_new, X509Certificate, ())                                                           \
  X(free_certificate, X509_free, void, (X509Certificate))                                                     \
  X(set_version, X509_set_version, int, (X509Certificate, long))                                              \
  X(serial_number, X509_get_serialNumber, Asn1String, (X509Certificate))                                      \
  X(set_integer, ASN1_INTEGER_set, int, (Asn1String, long))                                                   \
  X(begins, X509_getm_notBefore, Asn1String, (const struct X509CertificateTag*))                              \
  X(ends, X509_getm_notAfter, Asn1String, (const struct X509CertificateTag*))                                 \
  X(set_time, ASN1_TIME_set_string, int, (Asn1String, const char*))                                           \
  X(subject, X509_get_subject_name, X509Name, (const struct X509CertificateTag*))                             \
  X(add_name, X509_NAME_add_entry_by_txt, int,                                                                \
    (X509Name, const char* field, int kind, const unsigned char*, int bytes, int place, int set))             \
  X(set_issuer, X509_set_issuer_name, int, (X509Certificate, X509Name))                                       \
  X(set_public_key, X509_set_pubkey, int, (X509Certificate, EvpKey))                                          \
  X(sign, X509_sign, int, (X509Certificate, EvpKey, EvpDigest))                                               \
  X(digest, X509_digest, int, (const struct X509CertificateTag*, EvpDigest, unsigned char*, unsigned* bytes)) \
  X(clear_errors, ERR_clear_error, void, ())                                                                  \
  X(next_error, ERR_get_error, unsigned long, ())                                                             \
  X(error_words, ERR_reason_error_string, const char*, (unsigned long))

struct OpensslFunctions {
#define SIRTAKI_MEMBER(member, symbol, result, parameters) result(*member) parameters = nullptr;
  SIRTAKI_OPENSSL_FUNCTIONS(SIRTAKI_MEMBER)
#undef SIRTAKI_MEMBER
};

}  // namespace sirtaki

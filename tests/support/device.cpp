// A device for the tests: memory of the host that PyTorch takes for that of an accelerator.
//
// Operations run on copies in the CPU's memory. Code of the tests can forbid the host to read the
// device, which every accelerator punishes by a wait. Then reading a value raises an error.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

bool reads_are_forbidden = false;
int64_t reads = 0;                   // of the device by the host
thread_local int inside_kernel = 0;  // where the copies are the operation's own

// Copies to the host that nobody has waited for yet: until then, they hold no values.
auto& unfinished = *new std::vector<std::pair<at::Tensor, at::Tensor>>();

void finish_copies() {
  for (auto& [source, target] : unfinished) target.copy_(source);
  unfinished.clear();
}

void note_read() {
  if (inside_kernel) return;
  finish_copies();
  ++reads;
  TORCH_CHECK(!reads_are_forbidden, "the host read the device's memory, and so waited for it");
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    return {memory, memory, &std::free, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override { finish_copies(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isPinnedPtr(const void*) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto grown = allocator.allocate(bytes);
    std::memcpy(grown.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(bytes);
  }
};

// A view of a tensor's memory that the CPU's kernels take.
at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type());
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto source = from.device().is_cpu() ? from : on_host(from);
  auto target = to.device().is_cpu() ? to : on_host(to);
  if (from.device().type() == kDevice && to.device().is_cpu()) {
    if (non_blocking && !inside_kernel) {
      unfinished.emplace_back(source.clone(), target.zero_());
      return to;
    }
    note_read();
  }
  target.copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  note_read();
  return on_host(tensor).item();
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size,
                      c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(tensor, size, stride, offset);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::cpu::view_symint(tensor, size);
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::cpu::_reshape_alias_symint(tensor, size, stride);
}

at::Tensor& set_source(at::Tensor& tensor, at::Storage source, c10::SymInt offset,
                       c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set__symint(tensor, source, offset, size, stride);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / tensor.element_size());
  return at::cpu::set_(tensor, source, 0, {size}, {});
}

void by_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  struct Inside {
    Inside() { ++inside_kernel; }
    ~Inside() { --inside_kernel; }
  } inside;
  at::native::cpu_fallback(operation, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_source);
}

TORCH_LIBRARY(test_device, m) {
  m.def("forbid_reads(bool forbidden) -> ()", [](bool forbidden) {
    reads_are_forbidden = forbidden;
  });
  m.def("count_reads() -> int", [] { return reads; });
  m.def("register() -> ()", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
}

-- delivery, version, ids
local delivery, version = ARGV[2], tonumber(ARGV[3])
local wanted, num_wanted, rows, never = {}, 0, {}, {'never'}
for i = 4, #ARGV do
  if not wanted[ARGV[i]] then num_wanted = num_wanted + 1 end
  wanted[ARGV[i]] = true
end
local before = delivered_before(delivery)
if before[1] then
  if #before ~= num_wanted then return {'used'} end
  for _, r in ipairs(before) do
    if not wanted[r.id] then return {'used'} end
  end
  return repeat_delivery(before)
end
for i = 4, #ARGV do
  local id = ARGV[i]
  if wanted[id] then
    wanted[id] = nil
    local r = load(id)
    if not r then return {'unknown', id} end
    if r.state == 'ready' then
      rows[#rows + 1] = r
    elseif r.state ~= 'queued' and r.state ~= 'leased' then
      for _, told in ipairs({id, r.state, r.reason or ''}) do never[#never + 1] = told end
    end
  end
end
if never[2] then return never end
if #rows < num_wanted then return {'none', #rows, 0, 0} end
return give_out(rows, delivery, version, #rows, 0)
